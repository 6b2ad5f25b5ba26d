"""Split backwards give the fused backward's gradients; traces show what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.runtime.deepspeed_seams import recomputes_on_a_stream

from . import split
from .ranks import run_ranks

pytestmark = pytest.mark.distributed

ZERO_1 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


@pytest.mark.parametrize(
    ("world", "build", "extra"),
    [
        (2, {"tied_head": False}, {}),
        (4, {"tied_head": False}, {}),
        (1, {"tied_head": True}, {}),
        (2, {"tied_head": True, "dropout": 0.1}, {}),
        (2, {"tied_head": False, "activation_checkpoint_interval": 1, "dropout": 0.1}, {}),
        (
            2,
            {"tied_head": False, "activation_checkpoint_interval": 1},
            {"pipeline": {"use_reentrant": False}},
        ),
        (2, {"tied_head": False}, {"bf16": {"enabled": True}}),
        (2, {"tied_head": False}, ZERO_1),
        (2, {"tied_head": False}, {"gradient_clipping": 0.1}),
    ],
)
def test_zb_h1_equals_1f1b(
    world: int, build: dict[str, Any], extra: dict[str, Any], folder: Path
) -> None:
    if "pipeline" in extra and recomputes_on_a_stream():
        pytest.skip("this DeepSpeed fails at it on a CPU, stock too")
    run_ranks(split.gpt_as_fused, world, folder, build, extra)


def test_zb_h1_equals_1f1b_with_tensor_parallel_ranks(folder: Path) -> None:
    run_ranks(split.gpt_as_fused, 4, folder, {"tied_head": False}, {}, tensor=2)


def test_plain_linear_layers_are_split(folder: Path) -> None:
    run_ranks(split.shared_linear_as_fused, 2, folder)


def test_weights_that_are_computed_are_not_split(folder: Path) -> None:
    run_ranks(split.computed_weights, 2, folder)


def test_low_rank_adapters_over_frozen_layers(folder: Path) -> None:
    run_ranks(split.low_rank_adapters, 2, folder)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_traces(schedule: str, folder: Path) -> None:
    block = {"slices": split.SLICES, "schedule": schedule}
    results = run_ranks(split.traced, 2, folder, folder / "traces", block)
    pytest.importorskip("matplotlib")
    assert results[0].value == [
        f"step{step}{suffix}" for step in (1, 3) for suffix in ("-shares.json", ".json", ".png")
    ]
