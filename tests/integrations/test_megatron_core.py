"""megatron-core's own schedules, stock and sliced: equal losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.distributed.ranks import run_ranks

from . import megatron_lm_options
from . import megatron_lm_workers as workers
from .megatron_lm import Setting, gap

pytestmark = pytest.mark.distributed

LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "rope_type": "rope",
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}

SETTINGS: dict[int, dict[str, Setting]] = {
    1: {
        "one micro-batch": Setting(micro_batches=1),
        "three": Setting(slices=4),
        "one slice": Setting(slices=1),
        "zb-h1": Setting(schedule="zb-h1"),
        "labels": Setting(labels=True),
        "rope, grouped queries": Setting(positions="rope", config=LLAMA),
        "untied, full recompute": Setting(tied=False, config=FULL),
        "documents": Setting(documents=True, config=FULL),
        "window": Setting(config={"window_size": (6, 0)}),
        "softmax offset": Setting(config={"softmax_type": "learnable"}),
        "scaling by layer": Setting(
            config={"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}
        ),
        "latent attention": Setting(positions="rope", config=LATENT),
        "experts": Setting(config=EXPERTS),
        "tokens counted": Setting(counts_tokens=True, ddp={}),
    },
    2: {
        "one micro-batch": Setting(pipe=2, micro_batches=1),
        "three": Setting(pipe=2, config={"deallocate_pipeline_outputs": True}),
        "gpipe": Setting(pipe=2, schedule="gpipe", tied=False),
        "wrapped": Setting(pipe=2, ddp={}),
        "tokens counted": Setting(pipe=2, ddp={"overlap_grad_reduce": True}, counts_tokens=True),
        "zb-h1": Setting(pipe=2, schedule="zb-h1", ddp={"overlap_grad_reduce": True}),
        "rope, grouped queries, full recompute": Setting(
            pipe=2, positions="rope", config={**LLAMA, **FULL}, tied=False
        ),
        "selective recompute": Setting(
            pipe=2,
            config={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
        "experts": Setting(
            pipe=2,
            ddp={},
            config={
                **EXPERTS,
                **FULL,
                "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.2],
            },
        ),
        "half precision": Setting(
            pipe=2, labels=True, half=True, ddp={"grad_reduce_in_fp32": True}
        ),
        "reduction aligned": Setting(pipe=2, ddp={"overlap_grad_reduce": True}, aligned=True),
        "reduction aligned, zb-h1": Setting(
            pipe=2, ddp={"overlap_grad_reduce": True}, aligned=True, schedule="zb-h1"
        ),
        "varying lengths": Setting(
            pipe=2, varying=True, slices=3, config={"moe_token_dispatcher_type": "alltoall"}
        ),
        "tensor parallel": Setting(tensor=2),
    },
    4: {
        "one micro-batch": Setting(pipe=4, micro_batches=1),
        "three": Setting(pipe=4),
        "zb-h1": Setting(pipe=4, schedule="zb-h1"),
        "labels": Setting(pipe=4, labels=True),
        "as Megatron-LM": Setting(pipe=4, labels=True, sparse=True, ddp={}),
        "replicas": Setting(pipe=2, ddp={}),
        "replicas, overlapped": Setting(pipe=2, ddp={"overlap_grad_reduce": True}, tied=False),
        "sequence parallel": Setting(
            pipe=2, tensor=2, ddp={}, slices=(6, 12, 6), config={"sequence_parallel": True}
        ),
        "sequence parallel, rope": Setting(
            pipe=2,
            tensor=2,
            ddp={},
            positions="rope",
            slices=(6, 12, 6),
            config={**LLAMA, "sequence_parallel": True, "qk_layernorm": True, **FULL},
        ),
        "sequence parallel, labels": Setting(
            pipe=2, tensor=2, labels=True, ddp={}, slices=3, config={"sequence_parallel": True}
        ),
        "expert parallel": Setting(
            pipe=2,
            ddp={},
            config={
                **EXPERTS,
                "expert_model_parallel_size": 2,
                "moe_token_dispatcher_type": "allgather",
            },
        ),
    },
}


@pytest.mark.parametrize("world", SETTINGS)
def test_equals_stock(world: int, tmp_path: Path) -> None:
    settings = SETTINGS[world]
    for result in run_ranks(workers.compared, world, tmp_path, settings, timeout=240):
        for name, gaps in result.value.items():
            assert max(gaps.values()) <= settings[name].tolerance, (result.rank, name, gaps)


def test_dropping_the_context_gradient_is_seen(tmp_path: Path) -> None:
    (result,) = run_ranks(workers.without_context_gradients, 1, tmp_path, Setting())
    assert result.value["gradients"] > 1e-3


def test_options_act_as_in_stock(tmp_path: Path) -> None:
    for result in run_ranks(megatron_lm_options.options, 2, tmp_path):
        stock, sliced = result.value["stock"], result.value["sliced"]
        assert stock["scaled"] < 1e-12
        assert sliced["scaled"] < 1e-12
        # The first stage reduces with its last backward, the others after it.
        assert sliced["synced"] == stock["synced"] == result.rank
        evaluated = 3 + (stock["outputs"] is not None)
        assert sliced["first"] == stock["first"] == evaluated
        assert set(sliced["timers"]) == {"forward-backward", "forward-compute", "backward-compute"}
        assert set(sliced["timers"]) <= set(stock["timers"])
        if stock["outputs"] is not None:
            assert len(stock["outputs"]) == (3 if result.rank == 1 else 0)
            assert gap(sliced["outputs"], stock["outputs"]) < 1e-12
        assert len(sliced["other"]) == len(stock["other"])
        assert all(map(torch.equal, sliced["other"], stock["other"]))


def test_dropout_repeats_and_is_recomputed(tmp_path: Path) -> None:
    (result,) = run_ranks(megatron_lm_options.dropout, 1, tmp_path)
    assert result.value["again"] == result.value["recomputed"] == 0.0
    assert result.value["other seed"] > 0.1


def test_slack_is_run(tmp_path: Path) -> None:
    for result in run_ranks(megatron_lm_options.slack, 2, tmp_path):
        asked, difference = result.value
        assert asked == [0, 2, 0], "evaluation has no use for any"
        assert difference < 1e-12
