"""A GPT in megatron's wrappers, trained by megatron's own schedules on CPU ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional

from terapipe_ds.models.megatron_core import SequenceParallelNorm, TokenSliceCoreAttention
from terapipe_ds.models.without_cuda import prepare_megatron
from tests.conftest import SEED

LENGTH, SEQUENCES, VOCAB = 24, 2, 32


@dataclass(frozen=True)
class Setting:
    """What is trained, and how; ``config`` goes to megatron's configuration.

    ``sparse``: stages are given what they need and no mask, as by Megatron-LM. ``half``: bf16.
    """

    pipe: int = 1
    tensor: int = 1
    micro_batches: int = 3
    slices: Any = (5, 12, 7)
    schedule: str = "1f1b"
    positions: str = "learned_absolute"
    tied: bool = True
    ddp: dict[str, Any] | None = None
    labels: bool = False
    counts_tokens: bool = False
    documents: bool = False
    varying: bool = False
    sparse: bool = False
    aligned: bool = False
    half: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> dict[str, Any]:
        slices = self.slices if isinstance(self.slices, int) else list(self.slices)
        return {"slices": slices, "schedule": self.schedule, "timeout_s": 60}

    @property
    def tolerance(self) -> float:
        if self.half:
            return 0.1
        if self.labels:
            return 1e-5
        # Experts are scored in fp32 inside.
        return 1e-6 if "num_moe_experts" in self.config else 1e-12


class _OnCpu:
    """``torch`` for megatron's schedules, which ask for CUDA by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.zeros(*size, **kwargs)


def prepare_stock() -> None:
    """Lets megatron's own schedules, and its own attention, run without CUDA."""
    prepare_megatron()
    schedules.torch = _OnCpu()
    torch.cuda.synchronize = lambda *_: None
    # Tied weights are summed over stages when the model is built.
    Tensor.cuda = lambda tensor, *_, **__: tensor

    def window_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
        ones = torch.ones(queries, keys, dtype=torch.bool)
        return ~ones.tril(window[1]).triu(-window[0])

    fused_softmax.get_sliding_window_causal_mask = window_mask
    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size).tril() < 0.5


def initialize(setting: Setting) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setting.tensor,
        pipeline_model_parallel_size=setting.pipe,
        expert_model_parallel_size=setting.config.get("expert_model_parallel_size", 1),
    )


def config_of(setting: Setting) -> TransformerConfig:
    kind = MLATransformerConfig if "q_lora_rank" in setting.config else TransformerConfig
    dtype = torch.float32 if setting.labels else torch.float64
    dtype = torch.bfloat16 if setting.half else dtype
    return kind(
        **{
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # Large, so that attention matters.
            "init_method_std": 0.3,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "tensor_model_parallel_size": setting.tensor,
            "pipeline_model_parallel_size": setting.pipe,
            "calculate_per_token_loss": setting.counts_tokens,
            "variable_seq_lengths": setting.varying,
            "bf16": setting.half,
            **setting.config,
        }
    )


def model_of(setting: Setting) -> torch.nn.Module:
    """This rank's stage; the weights of all stages differ, and are the same in every call."""
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    config = config_of(setting)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if config.multi_latent_attention:
        assert spec.submodules.self_attention.module is MLASelfAttention
        # megatron's own does not take values of another width than keys.
        spec.submodules.self_attention.submodules.core_attention = TokenSliceCoreAttention
    norm = SequenceParallelNorm if config.sequence_parallel else WrappedTorchNorm
    for submodules in (spec.submodules, spec.submodules.self_attention.submodules):
        for name, module in vars(submodules).items():
            if module is WrappedTorchNorm:
                setattr(submodules, name, norm)
    torch.manual_seed(SEED + parallel_state.get_pipeline_model_parallel_rank())
    model: torch.nn.Module = GPTModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[spec] * (config.num_layers // setting.pipe), layer_norm=norm
        ),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        # Whole logits, for a loss in their own dtype.
        parallel_output=setting.labels,
        share_embeddings_and_output_weights=setting.tied,
        position_embedding_type=setting.positions,
    ).to(config.params_dtype)
    if setting.half:
        model = Float16Module(config, model)
    if setting.ddp is not None:
        ddp = DistributedDataParallelConfig(**setting.ddp)
        model = DistributedDataParallel(config, ddp, model)
        model.broadcast_params()
        config.no_sync_func = model.no_sync
        if ddp.overlap_grad_reduce and setting.aligned:
            config.grad_sync_func = model.start_grad_sync
        config.finalize_model_grads_func = finalize_model_grads
    return model


def batches(setting: Setting) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of this data-parallel rank."""
    draw = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
    for number in range(setting.micro_batches):
        length = LENGTH - 3 * number if setting.varying else LENGTH
        tokens = torch.randint(0, VOCAB, (SEQUENCES, length + 1), generator=draw)
        mask = (torch.rand(SEQUENCES, length, generator=draw) < 0.7).float()
        mask[:, : length // 4] = 0
        hidden = torch.ones(SEQUENCES, 1, length, length).tril() < 0.5
        if setting.documents:
            hidden[0, :, 10:, :10] = True
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask,
            "attention_mask": hidden,
            "position_ids": torch.arange(length).expand(SEQUENCES, -1),
        }


def loss_func(setting: Setting, batch: dict[str, Tensor], output: Tensor) -> Any:
    """From losses ``[b, s]``, or from logits ``[b, s, v]``."""
    losses, mask = output, batch["loss_mask"].to(output.dtype)
    if not setting.labels:
        flat = functional.cross_entropy(
            output.flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        losses = flat.view_as(mask)
    total, tokens = (losses * mask).sum(), mask.sum()
    if setting.counts_tokens:
        return total, tokens.int(), {"lm loss": (total.detach().clone(), tokens.detach())}
    return total / tokens, {"lm loss": (total / tokens).detach().clone()}


def forward_step(setting: Setting, iterator: Iterator[Any], model: Any) -> Any:
    """As scripts have it."""
    batch = next(iterator)
    if setting.sparse:
        first, last = model.module.pre_process, model.module.post_process
        output = model.module(
            batch["tokens"] if first else None,
            batch["position_ids"] if first else None,
            None,
            labels=batch["labels"] if last and setting.labels else None,
        )
        return output, partial(loss_func, setting, batch)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        # The core attention that latent attention is given here is causal by itself.
        None if "q_lora_rank" in setting.config else batch["attention_mask"],
        labels=batch["labels"] if setting.labels else None,
    )
    return output, partial(loss_func, setting, batch)


def run(function: Any, setting: Setting, model: torch.nn.Module, **kwargs: Any) -> list[Any]:
    """One call of a schedule."""
    return function(
        forward_step_func=partial(forward_step, setting),
        data_iterator=batches(setting),
        model=[model],
        num_microbatches=setting.micro_batches,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
        **kwargs,
    )


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    """By parameter, and experts' losses as they are logged; all are cleared."""
    found: dict[str, Tensor | None] = {
        name: logged["values"].clone()
        for name, logged in get_moe_layer_wise_logging_tracker().items()
    }
    clear_aux_losses_tracker()
    for name, parameter in model.named_parameters():
        grad = getattr(parameter, "main_grad", parameter.grad)
        found[name] = None if grad is None else grad.clone()
        parameter.grad = None
    if isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    return found


def gap(found: Any, expected: Any) -> float:
    """The largest difference, as a share of each tensor's largest entry."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        return max((gap(found[name], expected[name]) for name in expected), default=0.0)
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        return max(map(gap, found, expected), default=0.0)
    if expected is None:
        assert found is None
        return 0.0
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)


def compare(
    setting: Setting, sliced: Any, model: torch.nn.Module | None = None
) -> dict[str, float]:
    """How far sliced training and evaluation are from megatron's own.

    Args:
        setting: what is trained.
        sliced: the sliced schedule.
    """
    stock = schedules.get_forward_backward_func()
    model = model_of(setting) if model is None else model
    expected = run(stock, setting, model)
    expected_grads = gradients(model)
    assert any(grad is not None and grad.abs().max() > 0 for grad in expected_grads.values())
    found = run(sliced, setting, model)
    found_grads = gradients(model)
    with torch.no_grad():
        model.eval()
        evaluated = run(stock, setting, model, forward_only=True)
        evaluated_sliced = run(sliced, setting, model, forward_only=True)
        model.train()
    if setting.pipe == 1:
        assert len(expected) == setting.micro_batches
    return {
        "losses": gap([each["lm loss"] for each in found], [each["lm loss"] for each in expected]),
        "gradients": gap(found_grads, expected_grads),
        "evaluation": gap(
            [each["lm loss"] for each in evaluated_sliced], [each["lm loss"] for each in evaluated]
        ),
    }


def variant(setting: Setting, **changes: Any) -> Setting:
    changed = copy.copy(setting.__dict__)
    return Setting(**{**changed, **changes})
