"""What a user sees when something is wrong: one clear line on every rank, soon, and no hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import bad
from .ranks import run_ranks

pytestmark = pytest.mark.distributed

# What is wrong, and what the line must name: what was found, and the setting to change.
BAD_INPUT = {
    "sum": r"sum to 49, but the micro-batch has 48 tokens a sequence; change terapipe\.slices",
    "shorter": r"sum to 48, but the micro-batch has 40 tokens a sequence; change terapipe\.slices",
    "count": r"found 49 slices for a sequence of 48 tokens",
    "groups": r"cover 3 sequences, but the micro-batch has 2; .*train_micro_batch_size_per_gpu",
    "blocks": r"terapipe\.slices: found \[9, 30, 9\] on rank 0 and \[30, 9, 9\] on rank 1",
    "one rank without": r"terapipe\.enabled: found True on rank 0 and False on rank 1",
    "one rank has no block": r"terapipe: found 'a block' on rank 0 and 'no block' on rank 1",
    "one rank wrong": r"terapipe\.slice: found an unknown key, allowed are .*slices",
    "mask": r"found attn_mask_type no_mask, allowed is AttnMaskType\.causal",
    "window": r"window_size: found \(8, 1\), allowed is a window that ends .*change window_size",
    "trace": r"terapipe\.trace: found '/proc/nope', which cannot be written to .*change terapipe",
    "zero2": r"zero_optimization\.stage: found 2, allowed are 0 and 1",
    "attention dropout without reentrant": r"use_reentrant: found false (with attention_dropout|on "
    r"a CPU with DeepSpeed 0\.19\.[0-7],)",
    "ends early": r"iterator that ended after 1 of 2 micro-batches on stage 0",
    "ends early on the last stage": r"ended after 1 of 2 micro-batches on stage 1",
    "other lengths on the last stage": r"\(2, 48\) on the first stage and \(2, 40\) on the last",
    "no adapter": r"found ToyPipeline without an adapter, .*token_slice_adapter",
    "per_slice of another loss": r'terapipe\.loss: found "per_slice" .*"whole_sequence"',
    "whole sequence of groups": r"whole-sequence loss with 2 groups",
    "groups that balance": r"terapipe.slices: found 2 groups in a micro-batch, allowed is one",
    "compile": r"engine\.compile: found a call, allowed is none .*drop the call",
    "frozen between steps": r"requires_grad False, allowed is True .*; freeze layers before",
    "stages": r"found 2 stages for 1 pipeline layers",
    "not a pipeline": r"model: found Linear, allowed is a deepspeed PipelineModule",
}


@pytest.mark.parametrize("kind", BAD_INPUT)
def test_bad_input_is_one_clear_line_on_every_rank(kind: str, folder: Path) -> None:
    for result in run_ranks(bad.bad_input, 2, folder, kind, timeout=30, expect_success=False):
        assert result.exit_code == 1, result.output
        assert re.search(BAD_INPUT[kind], result.error), f"rank {result.rank}: {result.error}"


def test_an_attention_used_twice_by_a_stage_is_refused(folder: Path) -> None:
    kind = "tied attention on one stage"
    (result,) = run_ranks(bad.bad_input, 1, folder, kind, timeout=30, expect_success=False)
    assert result.exit_code == 1
    assert "found Mix used twice by one stage" in result.error


@pytest.mark.parametrize("how", ["killed", "stuck", "raises"])
def test_a_failed_rank_ends_all(how: str, folder: Path) -> None:
    timeout_s = 8.0
    broke_at = folder / "broke_at"
    results = run_ranks(
        bad.fails, 3, folder, how, timeout_s, broke_at, timeout=60, expect_success=False
    )
    assert all(result.exit_code != 0 for result in results)
    took = max(result.ended_at for result in results) - float(broke_at.read_text())
    assert took < timeout_s, f"the last rank ended {took:.1f} s after the failure"
    # Anywhere in what it printed: torch may have a trace of the lost store below.
    waiting = [results[0].output, results[2].output]
    for error in waiting:
        named = r"rank \d \(stage \d\) .*micro-batch \d, slice \d, from stage 1 \(rank 1\)"
        assert re.search(named, error) or (how == "raises" and "something broke" in error), error
    if how == "raises":
        assert "ValueError: something broke" in results[1].error
    if how == "stuck":
        assert any("waited 8 s for" in result.output for result in results)
