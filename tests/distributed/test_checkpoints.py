"""Checkpoints on other numbers of ranks than they were saved on: exact, or refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import checkpoints
from .ranks import RankResult, run_ranks

pytestmark = pytest.mark.distributed

TOLERANCES = {"tied": 1e-6, "untied": 1e-6, "bf16": 1e-4}
"""Relative, of a loss. The same numbers are added in another order; in bf16 others are rounded."""

Losses = dict[str, list[float]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, extensions_built: None) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(root: Path) -> tuple[str, Losses]:
    """Checkpoints of 2 stages after two steps, and the losses of the run that goes on."""
    folder = root / "saved"
    first, *_ = run_ranks(checkpoints.save, 2, folder, str(folder))
    return str(folder), first.value


@pytest.fixture(scope="module")
def resumed(root: Path, saved: tuple[str, Losses]) -> tuple[str, list[RankResult]]:
    """The same of 2 stages of 2 tensor-parallel ranks, and how 4 ranks went on from the former."""
    folder = root / "again"
    return str(folder), run_ranks(checkpoints.resume_on_four, 4, folder, saved[0], str(folder))


def test_universal_checkpoints_go_on(
    saved: tuple[str, Losses], resumed: tuple[str, list[RankResult]], folder: Path
) -> None:
    """From 2 stages to 4, to 2 replicas, to 2 tensor-parallel ranks; and from those to 1 rank."""
    (first, expected), (again, on_four) = saved, resumed
    # Without the optimizer's states the run is another one, and the comparison would see it.
    assert expected["weights alone"] != pytest.approx(expected["tied"], rel=1e-3)
    on_one = run_ranks(checkpoints.resume_on_one, 1, folder, first, again)
    for result in (*on_four, *on_one):
        assert len(result.value) == (2 if result in on_one else 3)
        for where, found in result.value.items():
            for name, losses in found.items():
                wanted = pytest.approx(expected[name], rel=TOLERANCES[name])
                assert losses == wanted, f"{name}, {where}, rank {result.rank}"


@pytest.mark.parametrize("stages", [1, 4])
def test_plain_checkpoints_keep_their_ranks_but_for_weights(
    stages: int, saved: tuple[str, Losses], resumed: tuple[str, list[RankResult]], folder: Path
) -> None:
    (first, expected), (again, _) = saved, resumed
    told = {
        "stages": rf"^load_checkpoint: found a checkpoint of 2 stages for a model of {stages}, "
        r"allowed is the same number .*ds_to_universal .*checkpoint\.load_universal to true, or "
        r"pass load_module_only=True for the weights alone \(found on rank 0\)$",
        "ranks": r"^load_checkpoint: found a checkpoint of 2 tensor-parallel ranks for a model "
        r"on 1, allowed is the same number; convert .*checkpoint\.load_universal to true ",
    }
    for result in run_ranks(checkpoints.plain, stages, folder, first, again, timeout=60):
        refused, found = result.value
        assert refused.keys() == told.keys()
        for kind, message in told.items():
            assert re.search(message, refused[kind]), f"rank {result.rank}: {refused[kind]}"
        for losses in found:
            assert losses == pytest.approx(expected["weights alone"], rel=1e-6)


def test_bf16_without_zero_is_read_by_zero_1(folder: Path) -> None:
    for result in run_ranks(checkpoints.bf16_without_zero, 2, folder, str(folder), timeout=60):
        assert re.search(
            r"^zero_optimization\.stage: found 0 with bf16, allowed is 1", result.value
        )
