"""The engine behaves as stock DeepSpeed does, and has none of the faults that users report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from terapipe_ds.runtime.deepspeed_seams import recomputes_on_a_stream

from . import behaviour
from .ranks import run_ranks
from .workers import worst

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("function", "world"),
    [
        (behaviour.evaluation, 1),
        (behaviour.evaluation, 2),
        (behaviour.fifty_evaluations, 2),
        (behaviour.additional_losses, 1),
        (behaviour.additional_losses, 2),
        (behaviour.changing_lengths, 2),
        (behaviour.mixed_lengths_in_one_step, 2),
        (behaviour.several_tensors_cross, 2),
        (behaviour.several_tensors_cross, 4),
        (behaviour.accumulation_is_a_mean, 2),
        (behaviour.batch_size_changes, 2),
        (behaviour.data_parallel, 4),
        (behaviour.dropout_repeats, 2),
        (behaviour.reused_buffers, 2),
        (behaviour.goes_on_after_an_error, 2),
        (behaviour.goes_on_after_an_error, 4),
        (behaviour.bf16_zero1, 2),
        (behaviour.torch_autocast, 1),
        (behaviour.torch_autocast, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_as_stock(function: Callable[[], None], world: int, folder: Path) -> None:
    run_ranks(function, world, folder)


has_fp16 = pytest.mark.skipif(
    not get_accelerator().is_fp16_supported(), reason="this CPU has no fp16 arithmetic"
)


@has_fp16
def test_fp16(folder: Path) -> None:
    run_ranks(behaviour.fp16, 2, folder)


@has_fp16
def test_every_stage_skips_a_step_that_overflows_on_one(folder: Path) -> None:
    run_ranks(behaviour.overflow_on_one_stage, 2, folder)


@pytest.mark.parametrize("module", ["core_attn", "mlp"])
def test_selective_recompute(module: str, folder: Path) -> None:
    run_ranks(behaviour.selective_recompute, 2, folder, module)


@pytest.mark.parametrize(
    ("replicas", "config", "build"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (1, {"sequence_parallel": True}, {}),
        (1, {"sequence_parallel": True, "qk_layernorm": True}, {"position_embedding_type": "rope"}),
        (1, {"sequence_parallel": True}, {"activation_checkpoint_interval": 1}),
    ],
)
def test_tensor_parallel(
    replicas: int, config: dict[str, Any], build: dict[str, Any], folder: Path
) -> None:
    run_ranks(behaviour.tensor_parallel, 4 * replicas, folder, replicas, config, build)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_and_biases_have_the_gradients_of_all_tensor_parallel_ranks(
    sequence_parallel: bool, folder: Path
) -> None:
    config = {"sequence_parallel": sequence_parallel, "qk_layernorm": True}
    one, other = run_ranks(behaviour.tensor_parallel_is_one_rank, 2, folder / "two", config)
    (alone,) = run_ranks(behaviour.tensor_parallel_is_one_rank, 1, folder / "one", config)
    # A key's bias moves all scores of a query alike: its gradient is 0, and rounding.
    whole = {
        name: grad
        for name, grad in alone.value.items()
        if ("norm" in name or "proj" in name) and not name.endswith("k_layernorm.bias")
    }
    assert any("q_layernorm" in name for name in whole)
    for ranks in (one, other):
        gap, name = worst({name: ranks.value[name] for name in whole}, whole)
        assert gap <= 1e-5, f"{name} differs by {gap:.1e} on rank {ranks.rank}"


@pytest.mark.parametrize("recompute", [False, True])
def test_sliding_window(recompute: bool, folder: Path) -> None:
    run_ranks(behaviour.sliding_window, 2, folder, recompute)


def test_evaluations_around_training_are_equal_on_all_ranks(folder: Path) -> None:
    results = run_ranks(behaviour.evaluate_train_evaluate, 2, folder)
    assert results[0].value == results[1].value


@pytest.mark.parametrize(
    ("use_reentrant", "dropout", "attention_dropout"),
    [(True, 0.0, 0.0), (False, 0.0, 0.0), (True, 0.1, 0.1), (False, 0.1, 0.0)],
)
def test_recompute_interval_1(
    use_reentrant: bool, dropout: float, attention_dropout: float, folder: Path
) -> None:
    if not use_reentrant and recomputes_on_a_stream():
        pytest.skip("this DeepSpeed fails at it on a CPU, stock too")
    run_ranks(behaviour.recompute, 2, folder, use_reentrant, dropout, attention_dropout)


@pytest.mark.parametrize("what", ["embedding", "first stage"])
def test_frozen(what: str, folder: Path) -> None:
    run_ranks(behaviour.frozen, 2, folder, what)


def test_checkpoints_load_with_and_without_the_block(folder: Path) -> None:
    run_ranks(behaviour.checkpoints, 2, folder, str(folder / "checkpoints"))


def test_tied_weights_stay_tied(folder: Path) -> None:
    first, *others = run_ranks(behaviour.tied_weights, 2, folder)
    assert sorted(first.value) == ["tied_modules.embed.weight", "tied_modules.mix.weight"]
    for other in others:
        for name, weight in first.value.items():
            assert torch.equal(weight, other.value[name]), name


def test_clipping_uses_the_norm_of_all_stages(folder: Path) -> None:
    (single,) = run_ranks(behaviour.clipped_steps, 1, folder / "single", False)
    for result in run_ranks(behaviour.clipped_steps, 2, folder, True):
        gap, name = worst(result.value, single.value)
        assert gap <= 1e-4, f"the step of {name} differs by {gap:.2e}"


@pytest.mark.parametrize("name", ["GPT2ModelPipe", "GPTModelPipe", "Anything"])
def test_a_class_name_changes_nothing(name: str, folder: Path) -> None:
    run_ranks(behaviour.renamed_class, 2, folder, name)


@pytest.mark.parametrize(
    ("layers", "zero_stage", "expected"),
    [(1, 0, [1, 1, 1, 1]), (1, 1, [1, 1, 1, 1]), (2, 1, [2, 1, 1, 1])],
)
def test_small_stages(layers: int, zero_stage: int, expected: list[int], folder: Path) -> None:
    for result in run_ranks(behaviour.layers_over_stages, 4, folder, layers, zero_stage):
        assert result.value == expected


def test_monitor_and_timers(folder: Path) -> None:
    results = run_ranks(behaviour.monitors_and_timers, 2, folder, str(folder / "monitor"))
    written = {path.name for path in (folder / "monitor").rglob("*.csv")}
    assert {"Train_Samples_train_loss.csv", "Train_Samples_eval_loss.csv"} <= written
    assert "pipe_recv_grad" in results[0].output


def test_without_the_block_the_engine_is_stock(folder: Path) -> None:
    (result,) = run_ranks(behaviour.stock_is_stock, 1, folder)
    assert result.value == "PipelineEngine, PipelineEngine"


def test_1f1b_holds_less_than_half_of_gpipe(folder: Path) -> None:
    held = {
        schedule: run_ranks(behaviour.peak_held, 4, folder / schedule, schedule)[0].value
        for schedule in ("gpipe", "1f1b")
    }
    assert held["1f1b"] < held["gpipe"] / 2, held
