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
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..errors import ConfigError
from ..runtime.adapter import ATTRIBUTE, SequenceAdapter, TensorDims
from ..runtime.device import use_own_device
from ..runtime.kv_context import get_current_slice
from .megatron_core import TokenSliceCoreAttention, check_layers, token_slice_layer_spec
from .split_backward import split_linear, split_linear_layers
from .tensor_parallel_grads import sum_over_tensor_ranks
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
) -> PipelineModule:
    """Builds this rank's stage of a GPT; trains under ``deepspeed.initialize`` and under ours.

    Sets up megatron's ``parallel_state`` over the same ranks as DeepSpeed's grid, and its random
    states, unless somebody has (an earlier model of this process too: its dropout states go on).
    Layers are seeded by their place in the model, so the weights do not depend on the number of
    stages.

    Args:
        config: megatron's configuration; layers, normalisation, grouped queries, MLP and dtype
            are taken from it.
        vocab_size: entries of the vocabulary, a multiple of the tensor-parallel size.
        seq_length: the longest sequence in tokens.
        num_stages: pipeline stages; or give ``topology``.
        topology: DeepSpeed's, with the axes ``pipe, data`` or ``pipe, data, model``.
        position_embedding_type: ``"learned_absolute"`` or ``"rope"``.
        rotary_base: period of rotary positions.
        rotary_percent: share of a head's width that rotary positions turn.
        tied_head: whether the output layer uses the embedding's weights.
        layer_spec: of a transformer layer; ``token_slice_layer_spec(config)`` if None.
        loss_fn: ``loss_fn(logits [l, b, v], labels)`` with the labels of :func:`batch`;
            :func:`token_mean_loss` if None.
        loss_is_token_mean: whether ``loss_fn`` is a mean over the tokens that the loss mask keeps,
            which lets slices compute their share of it; known for the default loss.
        seed: of the weights.
        partition_method: as in ``PipelineModule``.
        activation_checkpoint_interval: as in ``PipelineModule``; transformer layers only.

    Returns:
        The ``PipelineModule``, with a ``token_slice_adapter``.

    Raises:
        ConfigError: for a position embedding or a topology that is not among the above.
    """
    if position_embedding_type not in ("learned_absolute", "rope"):
        raise ConfigError(
            f"position_embedding_type: found {position_embedding_type!r}, allowed are "
            '"learned_absolute" and "rope"; change position_embedding_type'
        )
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
    if position_embedding_type == "rope":
        rotary = RotaryEmbedding(
            config.kv_channels,
            rotary_percent,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary_base,
        )
    spec = layer_spec or token_slice_layer_spec(config)
    embedding = {"vocab_size": vocab_size, "seq_length": seq_length}
    layers: list[LayerSpec] = [
        _embedding_spec(config, tied_head, position_embedding_type, **embedding)
    ]
    layers += [
        LayerSpec(GPTTransformerLayer, config, spec, layer_number=number, rotary=rotary)
        for number in range(1, config.num_layers + 1)
    ]
    layers.append(LayerSpec(GPTFinalNorm, config, spec))
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
        activation_checkpoint_interval=activation_checkpoint_interval,
        # megatron's own: it restores megatron's random states too, which attention dropout uses.
        activation_checkpoint_func=_checkpoint,
        checkpointable_layers=[GPTTransformerLayer.__name__],
    )
    setattr(module, ATTRIBUTE, _adapter(config, loss_fn, loss_is_token_mean))
    sum_over_tensor_ranks(module)
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
    tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What the data iterator yields for one micro-batch.

    Args:
        tokens: ``[b, L]``.
        labels: ``[b, L]``.
        loss_mask: ``[b, L]``, 0 where a token does not count in the loss; all count if None.

    Returns:
        ``((tokens, position_ids), (labels, loss_mask))``.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if loss_mask is None:
        loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    return (tokens, positions), (labels, loss_mask)


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


class GPTEmbedding(LanguageModelEmbedding):
    """The first layer: word and, where they are learned, position embeddings."""

    def __init__(
        self, config: TransformerConfig, *, vocab_size: int, seq_length: int, positions: str
    ) -> None:
        super().__init__(config, vocab_size, seq_length, position_embedding_type=positions)
        self.to(config.params_dtype)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Embeds ``(tokens, position_ids)``, each ``[b, l]``, as ``[l, b, h]``."""
        tokens, position_ids = inputs
        return super().forward(tokens, position_ids)

    splits_backward = False
    """Whether the tied output layer puts its weight's gradient off."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The tied output layer: ``[l, b, h]`` to ``[l, b, v]``."""
        weight = self.word_embeddings.weight
        product = split_linear if self.splits_backward and weight.requires_grad else _linear
        return product(
            hidden_states,
            weight,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=parallel_state.get_tensor_model_parallel_world_size() > 1
            and not self.config.sequence_parallel,
            sequence_parallel=self.config.sequence_parallel,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


class GPTTransformerLayer(torch.nn.Module):
    """A transformer layer that takes and gives one tensor, as ``PipelineModule`` layers do."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        *,
        layer_number: int,
        rotary: RotaryEmbedding | None,
    ) -> None:
        super().__init__()
        self.layer: TransformerLayer = build_module(spec, config=config, layer_number=layer_number)
        self.to(config.params_dtype)
        # In a tuple, so that it is not registered: all layers of the stage share it.
        self._rotary = (rotary,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[l, b, h]`` to ``[l, b, h]``; under sequence parallelism a share of ``l``."""
        output, _ = self.layer(
            hidden_states,
            attention_mask=None,
            rotary_pos_emb=self._rotary_table(hidden_states),
        )
        return output

    def _rotary_table(self, hidden_states: Tensor) -> Tensor | None:
        """The angles of the whole sequence, of which the layer takes its slice's."""
        (rotary,) = self._rotary
        if rotary is None:
            return None
        current = get_current_slice()
        if current is not None:
            return rotary(current.tokens.total)
        config = self.layer.config
        # Under sequence parallelism the layer is given this rank's share of the tokens.
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return rotary(shares * hidden_states.shape[0])


class GPTFinalNorm(torch.nn.Module):
    """The normalisation after the last layer, of the same kind as the layers'."""

    def __init__(self, config: TransformerConfig, spec: ModuleSpec) -> None:
        super().__init__()
        self.norm = build_module(
            spec.submodules.input_layernorm,
            config=config,
            hidden_size=config.hidden_size,
            eps=config.layernorm_epsilon,
        )
        self.to(config.params_dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[l, b, h]`` to ``[l, b, h]``."""
        return self.norm(hidden_states)


class GPTHead(torch.nn.Module):
    """An output layer with weights of its own."""

    def __init__(self, config: TransformerConfig, *, vocab_size: int) -> None:
        super().__init__()
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[l, b, h]`` to ``[l, b, v]``."""
        logits, _ = self.output_layer(hidden_states)
        return logits


def _checkpoint(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """megatron's checkpoint, also where no input needs a gradient (after a frozen embedding).

    Without one that does, it would detach the segment, and its layers would not train.
    """
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
        tensors = tuple(
            tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            for tensor in tensors
        )
    return tensor_parallel.checkpoint(function, False, *tensors)


def _check_stage(module: PipelineModule) -> None:
    """Raises if this stage cannot be sliced, or recomputed, correctly."""
    check_layers(module)
    if module.activation_checkpoint_func is not non_reentrant_checkpoint:
        return
    for layer in module.modules():
        if isinstance(layer, TokenSliceCoreAttention) and layer.dropout_p > 0.0:
            raise ConfigError(
                f"pipeline.use_reentrant: found false with attention_dropout {layer.dropout_p}, "
                "allowed is true (DeepSpeed's non-reentrant checkpoint does not restore megatron's "
                "random states); change pipeline.use_reentrant, or set attention_dropout to 0"
            )


def _linear(inputs: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    return tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
        inputs, weight, bias=None, **kwargs
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
    loss_fn: Callable[..., Tensor] | None,
    loss_is_token_mean: bool | None,
) -> SequenceAdapter:
    if loss_is_token_mean is None:
        loss_is_token_mean = loss_fn is None
    return SequenceAdapter(
        inputs=(_BATCH_FIRST, _BATCH_FIRST),
        labels=(_BATCH_FIRST, _BATCH_FIRST),
        boundary=(_SEQUENCE_FIRST,),
        output=_SEQUENCE_FIRST,
        mean_over_valid_tokens=loss_is_token_mean,
        token_weights=lambda labels: labels[1],
        check=_check_stage,
        multiple_of=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        split_backward=split_backward,
        keep_random_state=_keep_random_state,
    )


def split_backward(module: torch.nn.Module) -> None:
    """Lets all linear layers of a stage put their weights' gradients off."""
    split_linear_layers(module)
    for layer in module.modules():
        if isinstance(layer, GPTEmbedding):
            layer.splits_backward = True


@contextmanager
def _keep_random_state() -> Iterator[None]:
    """Puts the states of megatron's tracker back."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(states)


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
