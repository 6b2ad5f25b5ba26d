"""Fits of synthetic measurements: what they recover, what they prefer, what they refuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import Sample, StageCost, StageMemory, fit_stage
from terapipe_ds.planner.fit import median_error

LENGTHS = (32, 64, 128, 256, 512)
CONTEXTS = (0, 64, 192, 512, 1024)
# Between the measured ones.
NEW_LENGTHS = (48, 96, 192, 384)
NEW_CONTEXTS = (0, 128, 320, 768)
FORMS = {"paper", "joint", "causal", "floor", "table"}

# A base that is no line.
TOKENS = [32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0]
BASE = [3.0, 3.2, 5.0, 9.5, 15.0, 31.0, 60.0]

Time = Callable[[float, float, int], float]


def base(tokens: float) -> float:
    return float(np.interp(tokens, TOKENS, BASE))


def paper(length: float, context: float, sequences: int) -> float:
    """The paper's model: a base, and what context adds to it."""
    tokens = sequences * length
    jump = 0.4 + 0.003 * tokens if context else 0.0
    return base(tokens) + jump + sequences * (0.001 + 2e-5 * length) * context


def causal(length: float, context: float, sequences: int) -> float:
    """Each token also sees half of its slice, a term with the length squared."""
    seen = context + length / 2
    jump = 0.4 if context else 0.0
    return base(sequences * length) + jump + sequences * (0.001 + 2e-4 * length) * seen


def tiled(length: float, context: float, sequences: int) -> float:
    """A kernel whose price of a context token jumps with the length."""
    price = np.interp(length, LENGTHS, [0.02, 0.05, 0.06, 0.2, 0.21])
    return float(base(sequences * length) + sequences * price * (context + length / 2))


def floor(length: float, context: float, sequences: int) -> float:
    """Up to 128 tokens a kernel's launch takes as long as its work."""
    work = 2 + 0.05 * max(128.0, sequences * length)
    return work + sequences * 5e-6 * length * (context + length / 2)


def measured(
    time: Time,
    *,
    sequences: Sequence[int] = (1,),
    new_lengths: Sequence[int] = NEW_LENGTHS,
    noise: float = 0.0,
    seed: int = 0,
    repeats: int = 1,
) -> list[Sample]:
    """Samples on a grid and held-out ones off it; a backward takes 2 ms and 1.8 times as long."""
    rng = random.Random(seed)

    def sample(length: int, context: int, size: int, held_out: bool) -> Sample:
        forward = time(length, context, size)
        times = (ms * (1 + rng.uniform(-noise, noise)) for ms in (forward, 2 + 1.8 * forward))
        return Sample(length, context, size, *times, held_out=held_out)

    seen = itertools.product(LENGTHS, CONTEXTS, sequences, range(repeats))
    unseen = itertools.product(new_lengths, NEW_CONTEXTS, sequences)
    return [sample(*cell, held_out=False) for *cell, _ in seen] + [
        sample(*cell, held_out=True) for cell in unseen
    ]


def check_recovers(stage: StageCost, time: Time, sequences: Sequence[int]) -> None:
    """Forward and backward apart, seen and unseen."""
    for length, context, size in itertools.product(NEW_LENGTHS, CONTEXTS, sequences):
        forward = time(length, context, size)
        assert stage.forward(length, context, size) == pytest.approx(forward, rel=1e-6)
        assert stage.backward(length, context, size) == pytest.approx(2 + 1.8 * forward, rel=1e-6)


@pytest.mark.parametrize("sequences", [(1,), (1, 2, 4)])
def test_recovers_the_papers_model(sequences: Sequence[int]) -> None:
    samples = measured(paper, sequences=sequences)
    stage = fit_stage("stage 3", samples)
    assert set(stage.errors) == FORMS
    assert stage.errors["paper"] < 1e-9
    assert stage.errors["joint"] < 1e-6
    assert stage.error is not None
    assert stage.error == min(stage.errors.values()) < 1e-6
    check_recovers(stage, paper, sequences)
    assert (stage.name, stage.samples) == ("stage 3", tuple(samples))


def test_the_papers_parameters_can_be_read() -> None:
    """``a0``, ``a1``, the price ``a2 + a3 l`` at its two corners, and the base as measured."""
    forward = fit_stage("stage 0", measured(paper)).forward
    assert forward.form in ("paper", "joint")
    assert forward.own_share == 0
    assert forward.jump == pytest.approx((0.4, 0.003), rel=1e-6)
    assert forward.lengths == (0.0, 1024.0)
    assert forward.price_ms == pytest.approx((0.001, 0.001 + 2e-5 * 1024), rel=1e-6)
    assert forward.tokens == LENGTHS
    assert forward.base_ms == pytest.approx([base(length) for length in LENGTHS], rel=1e-6)


@pytest.mark.parametrize("sequences", [(1,), (1, 2, 4)])
def test_finds_the_term_with_the_length_squared(sequences: Sequence[int]) -> None:
    stage = fit_stage("stage 0", measured(causal, sequences=sequences))
    assert stage.forward.form == stage.backward.form
    assert stage.forward.form in ("causal", "table")
    assert stage.errors["causal"] < 1e-6
    assert stage.errors["paper"] > 1e-3 < stage.errors["joint"]
    check_recovers(stage, causal, sequences)


@pytest.mark.parametrize("sequences", [(1,), (1, 2, 4)])
def test_finds_prices_that_jump_with_the_length(sequences: Sequence[int]) -> None:
    stage = fit_stage("stage 0", measured(tiled, sequences=sequences))
    assert stage.forward.form == "table"
    assert stage.errors["table"] < 1e-6
    assert all(stage.errors[form] > 1e-3 for form in FORMS - {"table"})
    check_recovers(stage, tiled, sequences)


def test_finds_a_floor() -> None:
    stage = fit_stage("stage 0", measured(floor))
    assert stage.errors["floor"] < 1e-6
    check_recovers(stage, floor, (1,))


@pytest.mark.parametrize("seed", range(5))
def test_a_floor_is_among_the_best_in_noise(seed: int) -> None:
    stage = fit_stage("stage 0", measured(floor, noise=0.03, seed=seed))
    assert stage.errors["floor"] < 1.25 * min(stage.errors.values())


def test_prefers_a_floor_in_noise() -> None:
    """Fewer parameters follow less noise."""
    assert fit_stage("stage 0", measured(floor, noise=0.03)).forward.form == "floor"


@pytest.mark.parametrize("time", [paper, causal, tiled, floor])
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_three_percent_costs_little(time: Time, seed: int) -> None:
    stage = fit_stage("stage 0", measured(time, sequences=(1, 2), noise=0.03, seed=seed))
    assert stage.error is not None
    assert stage.error < 0.05
    truth = [sample for sample in measured(time, sequences=(1, 2)) if sample.held_out]
    assert median_error((stage.forward, stage.backward), truth) < 0.05


def test_a_base_measured_more_than_once_is_the_median() -> None:
    """One measurement in three that takes ten times as long does not move the paper's form."""
    samples = measured(paper, repeats=3)
    first = next(n for n, sample in enumerate(samples) if sample[:2] == (128, 0))
    slow = samples[first]._replace(forward_ms=50.0, backward_ms=90.0)
    samples[first] = slow
    assert fit_stage("stage 0", samples).errors["paper"] < 1e-9


def test_judges_on_what_it_has_not_seen() -> None:
    """Held-out samples alone make the errors."""
    samples = measured(paper)
    wrong = [
        sample._replace(forward_ms=9 * sample.forward_ms) if sample.held_out else sample
        for sample in samples
    ]
    stage = fit_stage("stage 0", wrong)
    assert stage.error is not None
    assert stage.error > 0.5
    assert stage.error == min(stage.errors.values())


def test_without_held_out_samples_there_is_no_error() -> None:
    """The form is chosen by what was seen."""
    seen = [sample for sample in measured(tiled) if not sample.held_out]
    stage = fit_stage("stage 0", seen)
    assert stage.error is None
    assert stage.errors == {}
    assert stage.forward.form == "table"


def test_two_lengths_without_context_are_enough() -> None:
    samples = [Sample(length, 0, 1, 1.0 + length, 2.0 + length) for length in (8, 16)]
    stage = fit_stage("stage 0", samples)
    lengths = np.array([8, 12, 16])
    assert stage.forward(lengths, 0) == pytest.approx(1.0 + lengths)
    assert stage.backward(lengths, 0) == pytest.approx(2.0 + lengths)


def test_never_below_half_of_what_was_measured() -> None:
    """A steep line goes below 0 for short slices, which take some time all the same."""
    samples = [Sample(length, 0, 1, length - 60.0, length - 60.0) for length in (64, 128)]
    forward = fit_stage("stage 0", samples).forward
    assert forward.least_ms == 2
    assert forward(np.arange(1, 200), 0).min() >= 2


def test_weight_gradients_are_fitted_where_they_were_put_off() -> None:
    assert fit_stage("stage 0", measured(paper)).weight is None
    put_off = [
        sample._replace(weight_ms=0.7 * sample.forward_ms)
        for sample in measured(paper, sequences=(1, 2))
    ]
    stage = fit_stage("stage 0", put_off)
    for length, context, size in itertools.product(NEW_LENGTHS, CONTEXTS, (1, 2)):
        expected = 0.7 * paper(length, context, size)
        assert stage.weight_share(length, context, size) == pytest.approx(expected, rel=1e-6)


def test_memory_goes_with_the_stage() -> None:
    memory = StageMemory(1.0, 2.0, 3.0, 4.0, 5.0)
    assert fit_stage("stage 0", measured(paper), memory=memory).memory is memory
    assert fit_stage("stage 0", measured(paper)).memory is None


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample(8, 0, 1, 1.0, 2.0)] * 3,
        [Sample(8, 0, 1, 1.0, 2.0), Sample(16, 8, 1, 1.0, 2.0)],
        [Sample(8, 0, 2, 1.0, 2.0), Sample(16, 0, 1, 1.0, 2.0)],
        [Sample(8, 0, 1, 1.0, 2.0), Sample(16, 0, 1, 1.0, 2.0, held_out=True)],
    ],
)
def test_refuses_fewer_than_two_lengths(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError) as caught:
        fit_stage("stage 0", samples)
    assert str(caught.value) == (
        "cost: found measurements of fewer than 2 lengths without context, allowed are at least 2; "
        "give the profiler a larger budget"
    )


@pytest.mark.parametrize("form", ["joint", "causal", "table"])
def test_lengths_that_are_almost_the_same(form: str) -> None:
    """1040 is no corner, as 1000 is one; all lie on one line, which the form can draw."""
    lengths = (256, 512, 1000, 1040)
    samples = [Sample(length, 0, 1, 1 + length / 100, 2 + length / 50) for length in lengths]
    samples.append(Sample(700, 0, 1, 8.0, 16.0, held_out=True))
    assert fit_stage("stage 0", samples).errors[form] < 1e-6
