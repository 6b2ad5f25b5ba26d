"""Sequences that grow over the steps, and prompts that are longer than those trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from . import lengths
from .ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_a_curriculum_of_lengths(folder: Path) -> None:
    for result in run_ranks(lengths.curriculum, 2, folder):
        assert result.value == lengths.LENGTHS


def test_a_curriculum_of_deepspeeds_sampler(folder: Path) -> None:
    (result,) = run_ranks(lengths.curriculum_of_the_sampler, 1, folder, str(folder / "clusters"))
    assert result.value == lengths.LENGTHS


TOLD = {
    "lengths": r"^slices: found lengths that sum to 16, but the micro-batch has 24 tokens a "
    r"sequence; change terapipe\.slices \(a count fits every length\) or the sequence length$",
    "legacy": r"^Legacy top-level 'curriculum_learning' has been removed\. Use '",
    "sampler": r"^data_efficiency\.data_sampling\.curriculum_learning\.enabled: found true with "
    r"training_data and 2 stages, allowed is one stage .*\(found on rank 0\)$",
}


def test_curricula_that_cannot_work_are_one_line_on_every_rank(folder: Path) -> None:
    told = dict(TOLD)
    if hasattr(DeepSpeedEngine, "curriculum_enabled_legacy"):
        # Before DeepSpeed 0.19.8 it is the script that cuts sequences, to which slices fit.
        del told["legacy"]
    for result in run_ranks(lengths.refused_curricula, 2, folder, str(folder), timeout=40):
        assert result.value.keys() == told.keys()
        for kind, pattern in told.items():
            assert re.search(pattern, result.value[kind]), f"rank {result.rank}: {result.value}"


@pytest.mark.parametrize("stages", [1, 2])
def test_long_prompts(stages: int, folder: Path) -> None:
    run_ranks(lengths.long_prompts, stages, folder)
