"""Profiles of a stage: what is timed, in which turns, and that nothing of it is left behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from terapipe_ds.planner import Sample, fit_stage
from terapipe_ds.runtime import profiler
from terapipe_ds.runtime.adapter import SequenceAdapter, TensorDims
from terapipe_ds.runtime.attention import causal_attention
from terapipe_ds.runtime.kv_context import extend, get_current_slice
from terapipe_ds.runtime.loss import MicroBatchLoss
from terapipe_ds.runtime.profiler import (
    Chain,
    HeldBytes,
    Measurements,
    SliceTimes,
    StageUnderTest,
    chains,
    held_bytes,
    measure,
    run_chain,
)
from terapipe_ds.runtime.weight_grads import owe, split_linear_layers
from terapipe_ds.scheme import SliceScheme, TokenRange

SEQUENCES, TOTAL, HEADS, WIDTH = 2, 12, 2, 4
HIDDEN = HEADS * WIDTH
# The chains that run whatever the budget is.
ESSENTIAL = 4
FEW = [
    Chain(SEQUENCES, (TOTAL,)),
    Chain(SEQUENCES, (5, 3, 4)),
    Chain(SEQUENCES, (6, 6)),
    Chain(SEQUENCES, (4, 8), held_out=True),
    Chain(SEQUENCES, (3, 3, 3, 3)),
    Chain(1, (TOTAL,)),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Attention(nn.Module):
    """One attention module on ``[tokens, sequences, hidden]``, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, dtype=torch.float64)
        self.out = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH)
        query, key, value = (part.reshape(shape) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(causal_attention(self, query, key, value).flatten(2))


def under_test(run: nn.Module, **more: Any) -> StageUnderTest:
    """Slices of one fixed input."""
    whole = random(TOTAL, SEQUENCES, HIDDEN)

    def inputs(sequences: int, tokens: TokenRange) -> Tensor:
        return whole[tokens.as_slice, :sequences].clone().requires_grad_()

    return StageUnderTest(
        run=run,
        inputs=inputs,
        parameters=list(run.parameters()),
        device=torch.device("cpu"),
        **more,
    )


def with_loss(scheme: SliceScheme) -> MicroBatchLoss:
    """A mean over tokens, as the last stage has it."""
    labels = random(scheme.seq_length, scheme.sequences, HIDDEN, seed=1)
    dims = TensorDims(batch=1, sequence=0)
    return MicroBatchLoss(
        nn.functional.mse_loss,
        SequenceAdapter((dims,), (dims,), (dims,), dims, mean_over_valid_tokens=True),
        labels,
        scheme,
        mode="per_slice",
        keep_outputs=False,
        additional_losses=lambda: None,
    )


@pytest.fixture
def stage() -> StageUnderTest:
    torch.manual_seed(2)
    return under_test(Attention())


def unsliced_gradients(module: Attention, *, loss: bool) -> dict[str, Tensor]:
    """By plain autograd, of the sum of the outputs or of the loss."""
    output = module(random(TOTAL, SEQUENCES, HIDDEN))
    labels = random(TOTAL, SEQUENCES, HIDDEN, seed=1)
    (nn.functional.mse_loss(output, labels) if loss else output.sum()).backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("lengths", [(12,), (5, 3, 4), (1, 11), (1,) * 12], ids=str)
def test_a_chain_makes_the_gradients_of_the_whole(
    lengths: tuple[int, ...], loss: bool, splits_backward: bool
) -> None:
    torch.manual_seed(2)
    module = Attention()
    expected = unsliced_gradients(module, loss=loss)
    if splits_backward:
        split_linear_layers(module)
    stage = under_test(module, loss=with_loss if loss else None, splits_backward=splits_backward)
    times = run_chain(stage, Chain(SEQUENCES, lengths))
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        error = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= 1e-13, name
    assert len(times) == len(lengths)
    assert all(forward > 0 and backward > 0 for forward, backward, _ in times)
    assert all(0 < weight < backward for _, backward, weight in times) == splits_backward
    assert get_current_slice() is None


def test_chains_add_up_in_the_same_gradients(stage: StageUnderTest) -> None:
    """As micro-batches do in training."""
    for _ in range(2):
        run_chain(stage, Chain(SEQUENCES, (6, 6)))
    twice = [parameter.grad.clone() for parameter in stage.parameters]
    run_chain(stage, Chain(SEQUENCES, (6, 6)))
    for before, parameter in zip(twice, stage.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, before * 1.5, rtol=1e-13, atol=1e-13)


def test_several_outputs_of_which_one_has_a_gradient() -> None:
    class Two(Attention):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.detach()

    torch.manual_seed(2)
    module = Two()
    run_chain(under_test(module), Chain(SEQUENCES, (5, 7)))
    expected = unsliced_gradients(_same(module), loss=False)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-13, atol=1e-13)


def _same(module: nn.Module) -> Attention:
    other = Attention()
    other.load_state_dict(module.state_dict())
    return other


def test_a_stage_without_parameters_has_no_backward() -> None:
    module = nn.Identity()
    stage = under_test(module)
    stage.inputs = lambda sequences, tokens: torch.zeros(tokens.length, sequences, HIDDEN)
    assert len(run_chain(stage, Chain(SEQUENCES, (6, 6)))) == 2


@given(
    seq_length=st.integers(1, 300),
    granularity=st.integers(1, 70),
    sequences=st.sampled_from([[1], [2, 1], [7, 3, 1]]),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_chains(seq_length: int, granularity: int, sequences: list[int]) -> None:
    made = chains(seq_length, sequences=sequences, granularity=granularity)
    for chain in made:
        assert sum(chain.lengths) == seq_length
        assert min(chain.lengths) >= 1
        assert chain.sequences in sequences
    # Most telling first, and all of it for the first number of sequences.
    assert made[0] == Chain(sequences[0], (seq_length,))
    assert [chain.sequences for chain in made] == sorted(
        (chain.sequences for chain in made), reverse=True
    )
    for number in sequences:
        own = [chain for chain in made if chain.sequences == number]
        assert any(chain.held_out for chain in own)
        assert own[0].lengths == (seq_length,)
    first = [chain for chain in made if chain.sequences == sequences[0]]
    assert sum(chain.held_out for chain in first) == 3
    assert not all(chain.held_out for chain in first)
    # Held-out slices are on the grid, but for the last one, which takes what is left.
    for chain in made:
        if chain.held_out and seq_length >= granularity:
            assert all(length % granularity == 0 for length in chain.lengths[:-1])
    assert made == chains(seq_length, sequences=sequences, granularity=granularity)


@given(seq_length=st.integers(2, 300), granularity=st.integers(1, 150))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_essential_chains_are_enough_to_fit(seq_length: int, granularity: int) -> None:
    if seq_length < 2 * granularity:
        return
    essential = chains(seq_length, sequences=[2, 1], granularity=granularity)[:ESSENTIAL]
    rounds = [[[(1.0 + length, 2.0, 0.5) for length in chain.lengths]] for chain in essential]
    fitted = fit_stage("stage 0", Measurements(essential, rounds).samples())
    assert fitted.error is not None


def test_chains_cover_short_and_long_slices_with_little_and_much_context() -> None:
    made = [c for c in chains(512, sequences=[1], granularity=8) if not c.held_out]
    assert {len(chain.lengths) for chain in made} >= {1, 2, 3, 4, 6, 8, 16, 32}
    lengths = {chain.lengths for chain in made}
    rising = (8, 16, 32, 64, 128, 264)
    assert {(384, 128), rising, rising[::-1]} <= lengths


def test_long_slices() -> None:
    assert Chain(1, (8,)).has_long_slice
    assert Chain(1, (2, 4, 2)).has_long_slice
    assert not Chain(1, (3, 3, 2)).has_long_slice


def test_samples_are_medians_with_their_context() -> None:
    made = [Chain(2, (5, 3)), Chain(1, (8,), held_out=True), Chain(1, (4, 4))]
    rounds: list[list[SliceTimes]] = [
        [
            [(1.0, 9.0, 0.0), (10.0, 20.0, 3.0)],
            [(3.0, 7.0, 1.0), (30.0, 90.0, 2.0)],
            [(2.0, 8.0, 5.0), (90.0, 30.0, 9.0)],
        ],
        [[(1.0, 2.0, 0.0)], [(2.0, 4.0, 0.0)]],
        [],
    ]
    assert Measurements(made, rounds).samples() == [
        Sample(5, 0, 2, 2.0, 8.0, False, 1.0),
        Sample(3, 5, 2, 30.0, 30.0, False, 3.0),
        Sample(8, 0, 1, 1.5, 3.0, True, 0.0),
    ]


def test_measurements_start_empty() -> None:
    found = Measurements(FEW)
    assert found.rounds == [[] for _ in FEW]
    assert found.samples() == []
    assert found.moved() == math.inf
    found.rounds[0].append([(1.0, 2.0, 0.0)])
    assert found.rounds[1] == []


def test_moved_is_the_median_change_of_the_medians() -> None:
    made = [Chain(1, (4, 4)), Chain(1, (8,))]
    first: list[SliceTimes] = [[(4.0, 6.0, 1.0), (2.0, 6.0, 9.0)], [(1.0, 1.0, 0.0)]]
    second: list[SliceTimes] = [[(4.0, 8.0, 5.0), (2.0, 6.0, 1.0)], [(2.0, 6.0, 0.0)]]
    rounds = [list(pair) for pair in zip(first, second, strict=True)]
    # 10 to a median of 11, 8 to 8, 2 to 5.
    assert Measurements(made, rounds).moved() == pytest.approx(0.1)
    # One more round of the second chain, far off: its median moves from 5 to 8.
    rounds[1].append([(50.0, 50.0, 0.0)])
    assert Measurements(made, rounds).moved() == pytest.approx(median([0.1, 0.0, 0.6]))
    assert Measurements(made, [rounds[0], rounds[1][:1]]).moved() == math.inf


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Chain]:
    """Chains in the order that they were run, all with the same times; and no real stage."""
    ran: list[Chain] = []

    def fake(stage: StageUnderTest, chain: Chain) -> SliceTimes:
        ran.append(chain)
        return [(1.0, 2.0, 0.0)] * len(chain.lengths)

    monkeypatch.setattr(profiler, "run_chain", fake)
    return ran


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        fake = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(profiler, "time", fake)

    def after(self, seconds: float) -> Callable[[Measurements], None]:
        def tick(found: Measurements) -> None:
            self.now += seconds

        return tick


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_times_are_those_of_their_slices(clock: Clock) -> None:
    """A forward takes a second a token, the rest of a slice 10 and, where it is put off, 100."""

    def tick(seconds: float) -> None:
        clock.now += seconds

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            tick(x.shape[0])
            ctx.tokens = x.shape[0]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            tick(10 * ctx.tokens)
            owe(lambda: tick(100 * ctx.tokens))
            return grad

    stage = under_test(nn.Identity())
    stage.run = Slow.apply
    lengths = (5, 3, 4)
    whole = [pytest.approx((1e3 * n, 1e4 * n, 0.0)) for n in lengths]
    assert run_chain(stage, Chain(SEQUENCES, lengths)) == whole
    stage.splits_backward = True
    split = [pytest.approx((1e3 * n, 1.1e5 * n, 1e5 * n)) for n in lengths]
    assert run_chain(stage, Chain(SEQUENCES, lengths)) == split


def test_turns(stage: StageUnderTest, timed: list[Chain], clock: Clock) -> None:
    """Two to warm up, then all in turn, those with a long slice twice; 3 rounds if steady."""
    found = Measurements(FEW)
    measure(stage, found, budget_s=1e9)
    one_round = [chain for chain in FEW for _ in range(2 if chain.has_long_slice else 1)]
    assert timed == FEW[:2] + one_round * 3
    assert [len(rounds) for rounds in found.rounds] == [3] * len(FEW)


def test_times_that_never_settle_end(
    stage: StageUnderTest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(range(10**6))

    def fake(stage: StageUnderTest, chain: Chain) -> SliceTimes:
        return [(2.0 ** next(runs), 1.0, 0.0)] * len(chain.lengths)

    monkeypatch.setattr(profiler, "run_chain", fake)
    found = Measurements(FEW[:2])
    measure(stage, found, budget_s=math.inf)
    assert [len(rounds) for rounds in found.rounds] == [25, 25]


def test_the_budget_ends_between_chains(
    stage: StageUnderTest, timed: list[Chain], clock: Clock
) -> None:
    found = Measurements(FEW)
    # After 8 chains it is 16 s, which is more than 15.
    measure(stage, found, budget_s=15, after_chain=clock.after(2))
    assert [len(rounds) for rounds in found.rounds] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("known", [0, 1, 3, 4, 6])
def test_essential_chains_run_without_a_budget(
    stage: StageUnderTest, timed: list[Chain], clock: Clock, known: int
) -> None:
    """Those of an earlier profile count."""
    clock_s = clock.after(1)
    earlier: list[list[SliceTimes]] = [
        [[(7.0, 7.0, 0.0)] * len(chain.lengths)] if index < known else []
        for index, chain in enumerate(FEW)
    ]
    found = Measurements(FEW, earlier)
    clock.now = 0
    measure(stage, found, budget_s=-1, after_chain=clock_s)
    assert [len(rounds) for rounds in found.rounds] == [
        1 if index < max(known, ESSENTIAL) else 0 for index in range(len(FEW))
    ]
    assert all(rounds[0][0] == (7.0, 7.0, 0.0) for rounds in found.rounds[:known])


def test_a_real_stage_without_a_budget(stage: StageUnderTest) -> None:
    found = Measurements(FEW)
    measure(stage, found, budget_s=0)
    assert [len(rounds) for rounds in found.rounds] == [1] * ESSENTIAL + [0] * 2
    assert [sample.length for sample in found.samples()] == [12, 5, 3, 4, 6, 6, 4, 8]


def test_an_earlier_profile_goes_on(
    stage: StageUnderTest, timed: list[Chain], clock: Clock
) -> None:
    """The round that was broken off is finished first."""
    earlier: list[list[SliceTimes]] = [
        [[(1.0, 2.0, 0.0)] * len(chain.lengths)] * (2 if index < 2 else 1)
        for index, chain in enumerate(FEW)
    ]
    found = Measurements(FEW, earlier)
    measure(stage, found, budget_s=1e9)
    twice = [chain for chain in FEW for _ in range(2 if chain.has_long_slice else 1)]
    rest = twice[twice.index(FEW[2]) :]
    assert timed == FEW[:2] + rest + twice
    assert [len(rounds) for rounds in found.rounds] == [3] * len(FEW)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_any_rank_may_end_it(
    stage: StageUnderTest, timed: list[Chain], clock: Clock, calls: int
) -> None:
    """Called before each round, twice, and before each chain; another rank says yes."""
    heard: list[bool] = []

    def any_rank(mine: bool) -> bool:
        heard.append(mine)
        return len(heard) == calls

    found = Measurements(FEW)
    measure(stage, found, budget_s=1e9, any_rank=any_rank)
    assert heard == [False] * calls
    assert [len(rounds) for rounds in found.rounds] == [
        int(index < calls - 3) for index in range(len(FEW))
    ]


def test_no_rank_ends_alone(stage: StageUnderTest, timed: list[Chain], clock: Clock) -> None:
    """This rank is out of time, and steady; it goes on until all are told to end."""
    asked: list[bool] = []

    def any_rank(mine: bool) -> bool:
        asked.append(mine)
        return len(asked) > 50

    found = Measurements(FEW)
    measure(stage, found, budget_s=0, any_rank=any_rank, after_chain=clock.after(1))
    assert asked.count(True) > 30
    assert min(len(rounds) for rounds in found.rounds) >= 5


def test_after_chain_sees_each_chain(stage: StageUnderTest, timed: list[Chain]) -> None:
    seen: list[int] = []
    found = Measurements(FEW)

    def after_chain(measured: Measurements) -> None:
        assert measured is found
        seen.append(sum(len(rounds) for rounds in measured.rounds))

    measure(stage, found, budget_s=0, after_chain=after_chain)
    assert seen == list(range(1, ESSENTIAL + 1))


def test_gradients_come_back(stage: StageUnderTest) -> None:
    first, *others = stage.parameters
    kept = torch.full_like(first, 3.0)
    first.grad = kept
    weights = [parameter.detach().clone() for parameter in stage.parameters]
    measure(stage, Measurements(FEW), budget_s=0)
    assert first.grad is kept
    assert torch.equal(kept, torch.full_like(first, 3.0))
    assert all(parameter.grad is None for parameter in others)
    for before, parameter in zip(weights, stage.parameters, strict=True):
        assert torch.equal(parameter, before)
    assert get_current_slice() is None


def test_gradients_come_back_after_an_error(stage: StageUnderTest) -> None:
    first, *others = stage.parameters
    kept = first.grad = torch.full_like(first, 3.0)

    def fail(found: Measurements) -> None:
        assert all(parameter.grad is not None for parameter in stage.parameters)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(stage, Measurements(FEW), budget_s=0, after_chain=fail)
    assert first.grad is kept and bool((kept == 3.0).all())
    assert all(parameter.grad is None for parameter in others)


class Mlp(nn.Module):
    """Keeps its input, its middle before the activation, and its middle after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 5, dtype=torch.float64)
        self.down = nn.Linear(5, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def test_held_bytes_of_an_mlp_by_hand() -> None:
    """Weights are kept for backward too, and are no activations; a double has 8 bytes."""
    stage = under_test(Mlp())
    expected = HeldBytes(activations=8 * (HIDDEN + 5 + 5), kv=0)
    assert held_bytes(stage, sequences=SEQUENCES, tokens=4) == expected
    assert held_bytes(stage, sequences=1, tokens=3) == expected


class Product(nn.Module):
    """No attention, but K and V that are kept whole: their product needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        key, value = (part[:, :, None] for part in self.kv(x).chunk(2, dim=-1))
        current = get_current_slice()
        assert current is not None
        keys, values = extend(self, key, value, current)
        return (keys * values).sum(0)


def test_held_bytes_keep_k_and_v_apart_by_hand() -> None:
    """Each token has a K and a V; else there is but the linear layer's input."""
    expected = HeldBytes(activations=8 * HIDDEN, kv=8 * 2 * HIDDEN)
    assert held_bytes(under_test(Product()), sequences=SEQUENCES, tokens=6) == expected


def test_held_bytes_of_attention(stage: StageUnderTest) -> None:
    """K and V exactly; of the rest, at least the two linear layers' inputs and the queries."""
    held = held_bytes(stage, sequences=SEQUENCES, tokens=6)
    assert held.kv == 8 * 2 * HIDDEN
    assert 8 * 3 * HIDDEN <= held.activations <= 8 * 8 * HIDDEN
    assert all(parameter.grad is None for parameter in stage.parameters)
    assert get_current_slice() is None


def test_held_bytes_with_a_loss() -> None:
    """It keeps the output, and labels."""
    without = held_bytes(under_test(Mlp()), sequences=SEQUENCES, tokens=6)
    found = held_bytes(under_test(Mlp(), loss=with_loss), sequences=SEQUENCES, tokens=6)
    assert found.activations >= without.activations + 8 * 2 * HIDDEN
