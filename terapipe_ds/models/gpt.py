"""A GPT of megatron-core layers as a DeepSpeed ``PipelineModule``, for stock and sliced training.

Shapes: ``b`` sequences, ``l`` tokens of a slice (``L`` of the whole sequence), ``h`` hidden size,
``v`` vocabulary entries of this tensor-parallel rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology
from deepspeed.runtime.utils import set_random_seed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..errors import ConfigError
from ..runtime.adapter import ATTRIBUTE, SequenceAdapter, TensorDims
from ..runtime.device import use_own_device
from .experts import BalanceOver, balances_micro_batch
from .gpt_layers import GPTEmbedding, GPTFinalNorm, GPTHead, GPTTransformerLayer, checkpoint
from .megatron_core import TokenSliceCoreAttention, check_layers, token_slice_layer_spec
from .split_backward import split_linear_layers
from .tensor_parallel_grads import sum_over_tensor_ranks
from .universal_checkpoint import describe_parameters
from .without_cuda import prepare_megatron

_TIED_KEY = "embedding"
_BATCH_FIRST = TensorDims(batch=0, sequence=1)
_SEQUENCE_FIRST = TensorDims(batch=1, sequence=0)


def gpt_pipeline(
    config: TransformerConfig,
    *,
    vocab_size: int,
    seq_length: int,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    position_embedding_type: str = "learned_absolute",
    rotary_base: int = 10000,
    rotary_percent: float = 1.0,
    tied_head: bool = True,
    layer_spec: ModuleSpec | None = None,
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None,
    loss_is_token_mean: bool | None = None,
    seed: int = 1234,
    partition_method: str = "type:transformerlayer",
    activation_checkpoint_interval: int = 0,
    packs_documents: bool = False,
    balance_over: BalanceOver = "micro_batch",
) -> PipelineModule:
    """Builds this rank's stage of a GPT; trains under ``deepspeed.initialize`` and under ours.

    Sets up megatron's ``parallel_state`` over the same ranks as DeepSpeed's grid, and its random
    states, unless somebody has (an earlier model of this process too: its dropout states go on).
    Layers are seeded by their place in the model, so the weights do not depend on the number of
    stages.

    Args:
        config: megatron's configuration; layers, normalisation, attention, MLP, experts,
            recomputation and dtype are taken from it.
        vocab_size: entries of the vocabulary, a multiple of the tensor-parallel size.
        seq_length: the longest sequence in tokens.
        num_stages: pipeline stages; or give ``topology``.
        topology: DeepSpeed's, with the axes ``pipe, data`` or ``pipe, data, model``.
        position_embedding_type: ``"learned_absolute"``, ``"rope"`` or ``"none"``; latent attention
            turns queries and keys by itself, whichever of these is asked for.
        rotary_base: period of rotary positions.
        rotary_percent: share of a head's width that rotary positions turn.
        tied_head: whether the output layer uses the embedding's weights.
        layer_spec: of all transformer layers; ``token_slice_layer_spec`` for each if None.
        loss_fn: ``loss_fn(logits [l, b, v], labels)`` with the labels of :func:`batch`;
            :func:`token_mean_loss` if None.
        loss_is_token_mean: whether ``loss_fn`` is a mean over the tokens that the loss mask keeps,
            which lets slices compute their share of it; known for the default loss.
        seed: of the weights.
        partition_method: as in ``PipelineModule``.
        activation_checkpoint_interval: as in ``PipelineModule``; transformer layers only. Or let
            ``config.recompute_granularity`` be ``"full"``.
        packs_documents: whether sequences hold several documents, each of which sees itself alone;
            :func:`batch` then takes their starts.
        balance_over: what experts' auxiliary losses compare: ``"micro_batch"`` as megatron, or
            ``"slice"``, see ``TokenSliceRouter``.

    Returns:
        The ``PipelineModule``, with a ``token_slice_adapter``.

    Raises:
        ConfigError: for a position embedding, a recomputation or a topology that is not among the
            above.
    """
    if position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise ConfigError(
            f"position_embedding_type: found {position_embedding_type!r}, allowed are "
            '"learned_absolute", "rope" and "none"; change position_embedding_type'
        )
    interval = checkpoint_interval(config, activation_checkpoint_interval)
    prepare_megatron()
    use_own_device()
    topology = topology or _topology(num_stages)
    _set_up_megatron(topology)
    # DeepSpeed cuts the stages; told of them, megatron would number the layers a second time.
    config = copy.copy(config)
    config.pipeline_model_parallel_size = 1

    tracker = tensor_parallel.get_cuda_rng_tracker()
    own_states = tracker.get_states() if tracker.is_initialized() else None
    # One rotary table for the stage; it has no parameters, so no layer owns it.
    rotary = None
    if position_embedding_type == "rope" and not config.multi_latent_attention:
        rotary = RotaryEmbedding(
            config.kv_channels,
            rotary_percent,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary_base,
        )
    specs = [
        layer_spec or token_slice_layer_spec(config, layer_number=number, balance_over=balance_over)
        for number in range(1, config.num_layers + 1)
    ]
    embedding = {"vocab_size": vocab_size, "seq_length": seq_length}
    layers: list[LayerSpec] = [
        _embedding_spec(config, tied_head, position_embedding_type, **embedding)
    ]
    layers += [
        LayerSpec(GPTTransformerLayer, config, spec, layer_number=number, rotary=rotary)
        for number, spec in enumerate(specs, start=1)
    ]
    layers.append(LayerSpec(GPTFinalNorm, config, specs[-1]))
    if tied_head:
        # The last stage's copy has no positions: it serves as the output layer alone.
        layers.append(
            _embedding_spec(config, True, "none", forward_fn=GPTEmbedding.logits, **embedding)
        )
    else:
        layers.append(LayerSpec(GPTHead, config, vocab_size=vocab_size))

    module = PipelineModule(
        layers,
        topology=topology,
        loss_fn=loss_fn or token_mean_loss,
        seed_layers=True,
        seed_fn=_seed_everything,
        base_seed=seed,
        partition_method=partition_method,
        activation_checkpoint_interval=interval,
        # megatron's own: it restores megatron's random states too, which attention dropout uses.
        activation_checkpoint_func=checkpoint,
        checkpointable_layers=[GPTTransformerLayer.__name__],
    )
    recompute_first_layers(module, config)
    adapter = _adapter(
        config,
        loss_is_token_mean=loss_fn is None if loss_is_token_mean is None else loss_is_token_mean,
        packs_documents=packs_documents,
        balance_over=balance_over,
    )
    setattr(module, ATTRIBUTE, adapter)
    sum_over_tensor_ranks(module)
    if config.perform_initialization:  # without it, megatron leaves its marks out
        describe_parameters(module)
    _count_once_in_norm(module)
    # Seeding by layer was for the weights; PipelineModule would go on and do it in every forward.
    module.seed_layers = False
    if own_states is not None:
        tensor_parallel.get_cuda_rng_tracker().set_states(own_states)
    else:
        # What is drawn from here on (dropout) must differ between stages, as in megatron.
        _seed_everything(seed + 100 * module.stage_id)
    return module


def batch(
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    reset_position_ids: bool = True,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """What the data iterator yields for one micro-batch.

    Args:
        tokens: ``[b, L]``.
        labels: ``[b, L]``.
        loss_mask: ``[b, L]``, 0 where a token does not count in the loss; all count if None.
        starts: of packed documents, see :func:`document_starts`; for a model that
            ``packs_documents``. megatron's ``reset_attention_mask``.
        reset_position_ids: whether positions start anew with each document.

    Returns:
        ``((tokens, position_ids), (labels, loss_mask))``, and the starts after the positions.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if loss_mask is None:
        loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    if starts is None:
        return (tokens, positions), (labels, loss_mask)
    if reset_position_ids:
        positions = positions - starts
    return (tokens, positions, starts), (labels, loss_mask)


def document_starts(tokens: Tensor, *, eod: int) -> Tensor:
    """Where each token's document starts, if documents end with a token of their own.

    Args:
        tokens: ``[b, L]``.
        eod: the token that ends a document, as a part of it.

    Returns:
        ``[b, L]`` int64: for each token the place in its sequence of its document's first token.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == eod
    return (places * first).cummax(dim=1).values


def token_mean_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Vocab-parallel cross entropy, mean over the tokens that the loss mask keeps.

    megatron computes it in fp32, whatever the dtype of the logits.

    Args:
        logits: ``[l, b, v]``, of a sequence or of a slice.
        labels: the labels and the loss mask, each ``[b, l]``.

    Returns:
        A scalar; 0 where no token counts.
    """
    targets, loss_mask = labels
    if not torch.is_grad_enabled():
        # megatron's cross entropy works in place on fp32 logits, which evaluation may return.
        logits = logits.clone()
    losses = vocab_parallel_cross_entropy(logits, targets.transpose(0, 1).contiguous())
    weights = loss_mask.transpose(0, 1).to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def checkpoint_interval(config: TransformerConfig, interval: int) -> int:
    """``activation_checkpoint_interval``, from megatron's full recomputation too.

    Raises:
        ConfigError: if both are asked for.
    """
    if config.recompute_granularity != "full":
        return interval
    if interval:
        raise ConfigError(
            f"activation_checkpoint_interval: found {interval} with recompute_granularity 'full', "
            "allowed is one of them; drop activation_checkpoint_interval, or "
            "recompute_granularity"
        )
    return config.recompute_num_layers if config.recompute_method == "uniform" else 0


def recompute_first_layers(module: PipelineModule, config: TransformerConfig) -> None:
    """megatron's ``recompute_method`` ``"block"``: the first layers of every stage, one by one."""
    if config.recompute_granularity != "full" or config.recompute_method != "block":
        return
    layers = [layer for layer in module.forward_funcs if isinstance(layer, GPTTransformerLayer)]
    for layer in layers[: config.recompute_num_layers]:
        layer.recomputes = True


def _check_stage(module: PipelineModule) -> None:
    """Raises if this stage cannot be sliced, or recomputed, correctly."""
    check_layers(module)
    if module.activation_checkpoint_func is not non_reentrant_checkpoint:
        return
    for layer in module.modules():
        if not isinstance(layer, TokenSliceCoreAttention):
            continue
        drawn = {"attention_dropout": layer.dropout_p}
        if layer.config.sequence_parallel:
            drawn["hidden_dropout"] = layer.config.hidden_dropout
        for name, share in drawn.items():
            if share > 0.0:
                raise ConfigError(
                    f"pipeline.use_reentrant: found false with {name} {share}, allowed is true "
                    "(DeepSpeed's non-reentrant checkpoint does not restore megatron's random "
                    f"states); change pipeline.use_reentrant, or set {name} to 0"
                )


def _embedding_spec(
    config: TransformerConfig,
    tied: bool,
    positions: str,
    *,
    vocab_size: int,
    seq_length: int,
    forward_fn: Callable[..., Tensor] | None = None,
) -> LayerSpec:
    arguments = {"vocab_size": vocab_size, "seq_length": seq_length, "positions": positions}
    if not tied:
        return LayerSpec(GPTEmbedding, config, **arguments)
    return TiedLayerSpec(
        _TIED_KEY,
        GPTEmbedding,
        config,
        forward_fn=forward_fn,
        tied_weight_attr="word_embeddings.weight",
        **arguments,
    )


def _adapter(
    config: TransformerConfig,
    *,
    loss_is_token_mean: bool,
    packs_documents: bool,
    balance_over: BalanceOver,
) -> SequenceAdapter:
    starts = (_BATCH_FIRST,) if packs_documents else ()
    has_experts = config.num_moe_experts is not None
    return SequenceAdapter(
        inputs=(_BATCH_FIRST, _BATCH_FIRST, *starts),
        labels=(_BATCH_FIRST, _BATCH_FIRST),
        boundary=(_SEQUENCE_FIRST, *starts),
        output=_SEQUENCE_FIRST,
        mean_over_valid_tokens=loss_is_token_mean,
        token_weights=lambda labels: labels[1],
        check=_check_stage,
        multiple_of=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        split_backward=split_backward,
        keep_random_state=_keep_states,
        balances_micro_batch=balance_over == "micro_batch" and balances_micro_batch(config),
        scale_auxiliary_losses=MoEAuxLossAutoScaler.set_loss_scale if has_experts else None,
    )


def split_backward(module: torch.nn.Module) -> None:
    """Lets all linear layers of a stage put their weights' gradients off."""
    split_linear_layers(module)
    for layer in module.modules():
        if isinstance(layer, GPTEmbedding):
            layer.splits_backward = True


@contextmanager
def _keep_states() -> Iterator[None]:
    """Puts megatron's random states back, and its record of auxiliary losses."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    recorded = get_moe_layer_wise_logging_tracker()
    values = {name: record["values"].clone() for name, record in recorded.items()}
    try:
        yield
    finally:
        tracker.set_states(states)
        for name, record in recorded.items():
            record["values"].copy_(values.get(name, torch.zeros_like(record["values"])))


def _count_once_in_norm(module: PipelineModule) -> None:
    """Marks parameters so that DeepSpeed's gradient norm counts each of the model's once.

    In ``clip_grad_norm_`` (DeepSpeed 0.19.8) all ranks but the first of a model count only
    tensor-parallel parameters. It thus leaves out the norms and biases of later stages, and counts
    a tied embedding on each stage that has a copy.
    """
    replicated_over_tensor = parallel_state.get_tensor_model_parallel_rank() > 0
    for parameter in module.parameters():
        if parameter.ds_pipe_replicated:
            parameter.tensor_model_parallel = False
        elif not replicated_over_tensor:
            parameter.model_parallel = True


def _topology(num_stages: int | None) -> ProcessTopology:
    world = dist.get_world_size()
    if num_stages is None or num_stages < 1 or world % num_stages != 0:
        raise ConfigError(
            f"num_stages: found {num_stages} for {world} ranks, allowed is a divisor of the number "
            "of ranks; change num_stages, or give a topology"
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)


def _set_up_megatron(topology: ProcessTopology) -> None:
    """megatron's groups over the ranks of DeepSpeed's grid, where nobody has made them yet."""
    tensor, data, pipe = (max(1, topology.get_dim(axis)) for axis in ("model", "data", "pipe"))
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipe
        )
    coordinates = topology.get_coord(dist.get_rank())
    grid = (getattr(coordinates, "model", 0), coordinates.data, coordinates.pipe)
    megatron = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if grid != megatron or (tensor, data, pipe) != sizes:
        raise ConfigError(
            f"topology: found (tensor, data, pipe) rank {grid} of {(tensor, data, pipe)} in "
            f"DeepSpeed's grid and {megatron} of {sizes} in megatron's parallel_state, allowed is "
            "the same in both; use the axes pipe, data, model, and matching parallel sizes"
        )


def _seed_everything(seed: int) -> None:
    seed = int(seed)  # numpy integers are no seeds to Python's random
    set_random_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
