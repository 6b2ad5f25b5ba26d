"""What ranks run for drawn settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional

from terapipe_ds.models.gpt import batch, document_starts, gpt_pipeline
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
        "warmup": draw.warmup,
        "loss": draw.loss,
        "timeout_s": 60,
    }
    if draw.dropout:
        # What an unsliced run drops is drawn in another order; recomputation must draw the same.
        expected = _train(dataclasses.replace(draw, recompute="none"), block)
    else:
        expected = _train(draw, None)
    found = _train(draw, block)
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
        data = iter(_batches(draw, seed=10 * step + replica))
        loss = engine.train_batch(data)
        # train_batch gives fp32, whatever the sum on the last stage is.
        kept = engine.total_loss if engine.is_last_stage() and draw.is_fp64 else loss
        found[f"loss of step {step}"] = kept.detach().clone()
    for name, parameter in module.named_parameters():
        # A key's bias moves all scores of a query alike: its gradient is 0, and rounding.
        if not name.endswith("k_layernorm.bias"):
            found[name] = parameter.detach().clone()
    return found


def _batches(draw: Draw, seed: int) -> list[Any]:
    made = batches(draw.micro_batches, seed=seed)
    if not draw.documents:
        return made
    # Every sixteenth token, about, ends a document.
    return [
        batch(tokens, *labels, starts=document_starts(tokens % 16, eod=3))
        for (tokens, _), labels in made
    ]


def _module(draw: Draw, topology: Any) -> Any:
    llama = draw.style == "llama"
    latent = draw.attention == "latent"
    settings = {**_recompute(draw), **_experts(draw)}
    if latent:
        settings |= {
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
            "rope_type": "yarn" if draw.positions == "none" else "rope",
        }
    if " " in draw.positions and not latent:
        settings["no_rope_freq"] = 2
    if draw.attention == "gate":
        settings["attention_output_gate"] = True
    if draw.attention in ("learnable", "off-by-one"):
        settings["softmax_type"] = draw.attention
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=cases.LAYERS,
        hidden_size=cases.HIDDEN,
        num_attention_heads=4,
        num_query_groups=draw.query_groups,
        hidden_dropout=draw.dropout,
        attention_dropout=draw.dropout,
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
        **settings,
    )
    module = gpt_pipeline(
        config,
        vocab_size=cases.VOCAB,
        seq_length=cases.SEQ_LENGTH,
        topology=topology,
        position_embedding_type=draw.positions.split()[0],
        tied_head=draw.tied_head,
        loss_fn=workers.mean_loss if draw.is_fp64 else None,
        loss_is_token_mean=True,
        seed=SEED,
        packs_documents=draw.documents,
    )
    # An earlier model of this process has seeded megatron's states; gpt_pipeline keeps them.
    torch.manual_seed(SEED + module.stage_id)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED + module.stage_id)
    return module


def _recompute(draw: Draw) -> dict[str, Any]:
    if draw.recompute in ("none", "reentrant", "non-reentrant"):
        return {}
    if draw.recompute in ("uniform", "block"):
        return {
            "recompute_granularity": "full",
            "recompute_method": draw.recompute,
            "recompute_num_layers": 1,
        }
    return {"recompute_granularity": "selective", "recompute_modules": [draw.recompute]}


def _experts(draw: Draw) -> dict[str, Any]:
    if draw.experts == "none":
        return {}
    losses = [draw.experts]
    if draw.experts == "all":
        losses = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    elif draw.experts == "z_loss":
        losses = ["none"]
    return {
        "num_moe_experts": 4,
        "moe_layer_freq": 1 if draw.tensor == 1 else [1, 0, 1, 1],
        "moe_router_load_balancing_type": losses,
        # Large, so that a wrong one is seen.
        "moe_aux_loss_coeff": [0.0 if loss == "none" else 0.5 for loss in losses],
        "moe_z_loss_coeff": 0.1 if draw.experts in ("z_loss", "all") else None,
        "moe_shared_expert_intermediate_size": 16,
        "moe_input_jitter_eps": draw.dropout or None,
        "moe_token_dispatcher_type": "alltoall" if draw.zero else "allgather",
        "moe_router_score_function": "sigmoid" if draw.tied_head else "softmax",
    }


def _settings(draw: Draw) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "gradient_clipping": draw.clipping,
        "prescale_gradients": draw.prescale,
    }
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
