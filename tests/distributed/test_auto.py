"""``"slices": "auto"``: plans on the spot, the same on all ranks, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import auto
from .ranks import run_ranks

BF16 = {"bf16": {"enabled": True}}
ZERO1_BF16 = {
    **BF16,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("world", "extra", "dropout", "experts"),
    [
        (1, {}, 0.0, False),
        (2, {}, 0.1, True),
        (2, ZERO1_BF16, 0.1, False),
        (2, BF16, 0.0, False),
        (4, {}, 0.0, False),
    ],
)
def test_profiling_leaves_no_trace(
    world: int, extra: dict[str, Any], dropout: float, experts: bool, folder: Path
) -> None:
    run_ranks(auto.exact, world, folder, folder / "cache", extra, dropout, experts)


def test_all_ranks_have_the_plan_and_costs_are_cached(folder: Path) -> None:
    results = run_ranks(auto.plans_agree, 2, folder, folder / "cache")
    assert results[0].value == results[1].value
    assert list((folder / "cache").glob("cost-*.json"))


@pytest.mark.parametrize(
    ("function", "world"),
    [
        (auto.batch_size_changes, 2),
        (auto.costs_depend_on, 2),
        (auto.buffers_and_work_in_place, 2),
        (auto.odd_lengths_under_sequence_parallelism, 4),
        (auto.broken_cache, 2),
        (auto.unwritable_cache, 2),
        (auto.new_shapes, 2),
        (auto.whole_sequence_loss, 2),
        (auto.several_tensors, 2),
        (auto.nothing_fits, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_auto(function: Callable[[Path], None], world: int, folder: Path) -> None:
    run_ranks(function, world, folder, folder / "cache")


def test_a_checkpoint_keeps_the_plan(folder: Path) -> None:
    run_ranks(auto.checkpoint, 2, folder, folder / "cache", folder / "saved")


def test_pipelines_with_different_shapes_plan_together(folder: Path) -> None:
    results = run_ranks(auto.two_pipelines, 4, folder, folder / "cache")
    assert len({result.value for result in results}) == 1


def test_the_engine_runs_with_the_slack_that_is_given(folder: Path) -> None:
    first, last = run_ranks(auto.run_with_slack, 2, folder, timeout=60)
    tight, slack = first.value
    assert " ".join(tight) == "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0"
    assert " ".join(slack) == "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0"
    assert last.value[0] == last.value[1]
