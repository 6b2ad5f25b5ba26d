"""What ranks run for drawn settings."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from terapipe_ds.models.gpt import gpt_pipeline
from tests.conftest import SEED

from . import cases, workers
from .draws import Draw
from .workers import batches, engine_of, initialize_distributed


def compare(listed: list[Draw]) -> list[tuple[float, str]]:
    """For each setting the largest difference from stock DeepSpeed's run, and what differs."""
    initialize_distributed()
    # DeepSpeed's reduction of gradients knows no float64 on CPU, though it would run as it is.
    known = get_accelerator().supported_dtypes()
    get_accelerator().supported_dtypes = lambda: [*known, torch.float64]
    return [_compare(draw) for draw in listed]


def _compare(draw: Draw) -> tuple[float, str]:
    block = {
        "slices": draw.slices,
        "schedule": draw.schedule,
        "loss": draw.loss,
        "timeout_s": 60,
    }
    expected, found = _train(draw, None), _train(draw, block)
    assert set(expected) == set(found)
    return max((workers.difference(found[name], expected[name]), name) for name in expected)


def _train(draw: Draw, block: Any) -> dict[str, Tensor]:
    """Losses and parameters of two steps."""
    topology = PipeModelDataParallelTopology(draw.pipe, draw.tensor, draw.data)
    module = _module(draw, topology)
    engine = engine_of(
        module,
        draw.micro_batches,
        block,
        # A step as large as the weights, so that parameters show their gradients.
        lambda chosen: torch.optim.SGD(chosen, lr=1.0),
        **_settings(draw),
    )
    if draw.is_fp64:
        engine.communication_data_type = torch.float64
    replica = topology.get_coord(torch.distributed.get_rank()).data
    found: dict[str, Tensor] = {}
    for step in range(2):
        data = iter(batches(draw.micro_batches, seed=10 * step + replica))
        loss = engine.train_batch(data)
        # train_batch gives fp32, whatever the sum on the last stage is.
        kept = engine.total_loss if engine.is_last_stage() and draw.is_fp64 else loss
        found[f"loss of step {step}"] = kept.detach().clone()
    for name, parameter in module.named_parameters():
        # A key's bias moves all scores of a query alike: its gradient is 0, and rounding.
        if not name.endswith("k_layernorm.bias"):
            found[name] = parameter.detach().clone()
    return found


def _module(draw: Draw, topology: Any) -> Any:
    llama = draw.style == "llama"
    selective = draw.recompute == "selective"
    config = TransformerConfig(
        num_layers=cases.LAYERS,
        hidden_size=cases.HIDDEN,
        num_attention_heads=4,
        num_query_groups=draw.query_groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=functional.silu if llama else functional.gelu,
        add_bias_linear=not llama,
        qk_layernorm=draw.qk_layernorm,
        window_size=None if draw.window is None else (draw.window, 0),
        window_attn_skip_freq=2 if draw.window is not None else None,
        tensor_model_parallel_size=draw.tensor,
        sequence_parallel=draw.sequence_parallel,
        params_dtype=torch.float64 if draw.is_fp64 else torch.float32,
        **({"recompute_granularity": "selective"} if selective else {}),
    )
    return gpt_pipeline(
        config,
        vocab_size=cases.VOCAB,
        seq_length=cases.SEQ_LENGTH,
        topology=topology,
        position_embedding_type=draw.positions,
        tied_head=draw.tied_head,
        loss_fn=workers.mean_loss if draw.is_fp64 else None,
        loss_is_token_mean=True,
        seed=SEED,
    )


def _settings(draw: Draw) -> dict[str, Any]:
    settings: dict[str, Any] = {"gradient_clipping": draw.clipping}
    # Stock shares what crosses between the tensor-parallel ranks, as if all had the same.
    pipeline: dict[str, Any] = {"pipe_partitioned": False, "grad_partitioned": False}
    if draw.recompute.endswith("reentrant"):
        pipeline["activation_checkpoint_interval"] = 1
        pipeline["use_reentrant"] = draw.recompute == "reentrant"
    settings["pipeline"] = pipeline
    if draw.zero:
        settings["zero_optimization"] = {"stage": 1}
        settings["zero_allow_untested_optimizer"] = True
    if draw.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if draw.precision == "fp16":
        # Fixed: whether a sum overflows may depend on its order, and then a step is skipped.
        settings["fp16"] = {"enabled": True, "loss_scale": 64}
    return settings
