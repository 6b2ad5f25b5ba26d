"""Times one stage's real layers in slices, as the engine runs them but without a pipeline around.

What is run is a *chain*: a sequence cut into slices, forward first to last, backward last to first,
each slice timed. Every slice of a chain is a sample of (length, context), memory is as full as in
training, and weight gradients are added to as they are there. All chains take turns, round after
round, so that a slow minute of the machine touches all of them alike; a sample is the median over
rounds. Needs torch and the package's pure parts only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..planner.cost import Sample
from ..scheme import SliceScheme, TokenRange
from .kv_context import SequenceContext, current_slice
from .weight_grads import Work, put_off

Tensors = Tensor | tuple[Tensor, ...]

# Even cuts that are timed, most telling first: a budget may end the first round early.
_COUNTS = (1, 8, 2, 16, 4, 32, 3, 6)
_HELD_OUT = 3
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 25
# Chains that a fit cannot do without; they run whatever the budget is.
_ESSENTIAL = 4
# Medians that move by less than this from round to round are steady.
_STEADY = 0.01
_SEED = 1234


class SliceLoss(Protocol):
    """What the last stage adds to a slice: ``loss.MicroBatchLoss``, or anything like it."""

    def forward(self, group: int, index: int, output: Any) -> None:
        """Takes a slice's output."""

    def take_root(
        self, group: int, index: int, scale: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Where a slice's backward starts."""


@dataclass
class StageUnderTest:
    """A stage's real layers, and what feeds them.

    Attributes:
        run: from a slice's inputs to its outputs.
        inputs: makes the inputs of (sequences, tokens), leaves of their own.
        parameters: of the stage; their gradients are left as they were.
        device: where it runs.
        loss: on the last stage, makes the loss of a scheme.
        autocast: around every forward.
        splits_backward: whether weight gradients are put off, and timed apart.
    """

    run: Callable[[Tensors], Any]
    inputs: Callable[[int, TokenRange], Tensors]
    parameters: Sequence[Tensor]
    device: torch.device
    loss: Callable[[SliceScheme], SliceLoss] | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    splits_backward: bool = False

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()


class Chain(NamedTuple):
    """A sequence, or the start of one, cut into slices to be timed."""

    sequences: int
    lengths: tuple[int, ...]
    held_out: bool = False

    @property
    def has_long_slice(self) -> bool:
        """Whether one slice is half of it, or more."""
        return 2 * max(self.lengths) >= sum(self.lengths)


def chains(seq_length: int, *, sequences: Sequence[int], granularity: int) -> list[Chain]:
    """What to time, most telling first.

    Args:
        seq_length: tokens of a sequence.
        sequences: numbers of sequences that go together; all chains are made for the first.
        granularity: the shortest slice worth knowing, in tokens.
    """
    counts = [count for count in _COUNTS if count <= max(1, seq_length // granularity)]
    draw = random.Random(_SEED)
    made: list[Chain] = []
    for position, b in enumerate(sequences):
        own = counts if position == 0 else counts[:4]
        cuts = [
            SliceScheme.even(sequences=b, seq_length=seq_length, count=n, unit=granularity)
            for n in own
        ]
        even = [Chain(b, cut.groups[0].lengths) for cut in cuts]
        if position == 0 and seq_length >= 4 * granularity:
            # Between the whole and the half, where nothing else lies; and all short lengths, with
            # little context and with much.
            long = 3 * seq_length // 4 // granularity * granularity
            rising = _rising_lengths(seq_length, granularity)
            uneven = [(long, seq_length - long), rising, rising[::-1]]
            even[_ESSENTIAL:_ESSENTIAL] = [Chain(b, lengths) for lengths in uneven]
        held_out = [
            Chain(b, _random_lengths(draw, seq_length, granularity), held_out=True)
            for _ in range(_HELD_OUT if position == 0 else 1)
        ]
        made += [*even[: _ESSENTIAL - 1], held_out[0], *even[_ESSENTIAL - 1 :], *held_out[1:]]
    return made


def _rising_lengths(seq_length: int, granularity: int) -> tuple[int, ...]:
    """Lengths that double from the granularity on, and what is left as the last."""
    lengths = []
    length = granularity
    while sum(lengths) + 2 * length < seq_length:
        lengths.append(length)
        length *= 2
    return (*lengths, seq_length - sum(lengths))


def _random_lengths(draw: random.Random, seq_length: int, granularity: int) -> tuple[int, ...]:
    """A random cut on the grid into about 6 slices."""
    steps = seq_length // granularity
    cuts = sorted(draw.sample(range(1, steps), min(5, steps - 1))) if steps > 1 else []
    stops = [granularity * cut for cut in cuts] + [seq_length]
    return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))


SliceTimes = list[tuple[float, float, float]]
"""(forward, backward with weight gradients, weight gradients that were put off) of slices, ms."""


def run_chain(stage: StageUnderTest, chain: Chain) -> SliceTimes:
    """Runs a chain, forward and backward, and times every slice."""
    scheme = SliceScheme([(chain.sequences, list(chain.lengths))])
    ranges = scheme.groups[0].ranges()
    loss = stage.loss(scheme) if stage.loss is not None else None
    context = SequenceContext()
    outputs: list[tuple[Tensor, ...]] = []
    forward: list[float] = []
    for index, tokens in enumerate(ranges):
        inputs = stage.inputs(chain.sequences, tokens)
        with _timed(stage, forward):
            with current_slice(tokens, context), stage.autocast():
                output = stage.run(inputs)
            if loss is not None:
                loss.forward(0, index, output)
        outputs.append(output if isinstance(output, tuple) else (output,))
    backward: list[float] = []
    weight: list[float] = []
    for index, tokens in reversed(list(enumerate(ranges))):
        if loss is None:
            roots = [tensor for tensor in outputs.pop() if tensor.requires_grad]
            grads: list[Tensor | None] = [torch.ones_like(root) for root in roots]
        else:
            outputs.pop()
        owed: list[Work] = []
        puts_off = put_off(owed) if stage.splits_backward else nullcontext()
        with _timed(stage, backward), current_slice(tokens, context, backward=True), puts_off:
            if loss is not None:
                root, grad = loss.take_root(0, index, lambda value: value)
                roots, grads = [root], [grad]
            if roots:
                torch.autograd.backward(roots, grads)
        with _timed(stage, weight):
            for work in owed:
                work()
    weight = weight if stage.splits_backward else [0.0] * len(backward)
    whole = [inputs + apart for inputs, apart in zip(backward, weight, strict=True)]
    return list(zip(forward, reversed(whole), reversed(weight), strict=True))


@contextmanager
def _timed(stage: StageUnderTest, times: list[float]) -> Iterator[None]:
    stage.synchronize()
    start = time.perf_counter()
    yield
    stage.synchronize()
    times.append((time.perf_counter() - start) * 1e3)


@dataclass
class Measurements:
    """The rounds of every chain so far; what a profile resumes from."""

    chains: list[Chain]
    rounds: list[list[SliceTimes]] = field(default_factory=list)
    """For each chain what its rounds gave."""

    def __post_init__(self) -> None:
        self.rounds = self.rounds or [[] for _ in self.chains]

    def samples(self) -> list[Sample]:
        """Medians over rounds, for every slice of every chain that was run."""
        return [
            Sample(
                length=length,
                context=sum(chain.lengths[:index]),
                sequences=chain.sequences,
                forward_ms=median(times[index][0] for times in rounds),
                backward_ms=median(times[index][1] for times in rounds),
                held_out=chain.held_out,
                weight_ms=median(times[index][2] for times in rounds),
            )
            for chain, rounds in zip(self.chains, self.rounds, strict=True)
            if rounds
            for index, length in enumerate(chain.lengths)
        ]

    def moved(self) -> float:
        """By how much the last round moved the medians: the median relative change."""
        changes = []
        for rounds in self.rounds:
            if len(rounds) < 2:
                return float("inf")
            for index in range(len(rounds[0])):
                totals = [sum(times[index][:2]) for times in rounds]
                before = median(totals[:-1])
                changes.append(abs(median(totals) - before) / before)
        return median(changes)


def measure(
    stage: StageUnderTest,
    found: Measurements,
    *,
    budget_s: float,
    any_rank: Callable[[bool], bool] = lambda mine: mine,
    after_chain: Callable[[Measurements], None] = lambda found: None,
) -> None:
    """Runs chains in turns until the medians are steady or the budget is spent.

    Args:
        stage: what to time.
        found: where times are added; not empty if an earlier profile goes on.
        budget_s: seconds to spend; the few chains that a fit needs run whatever it is.
        any_rank: where stages are timed side by side, whether any rank says yes; called between
            chains, so that all start each chain together and end together.
        after_chain: told after each chain, for progress and for saving.
    """
    start = time.monotonic()
    with _gradients_kept(stage.parameters):
        # The first pass of all: memory is claimed, kernels are chosen. Also makes gradients, to
        # which training adds too.
        for chain in found.chains[:2]:
            run_chain(stage, chain)
        while True:
            done = min(len(rounds) for rounds in found.rounds)
            if any_rank(done >= _MOST_ROUNDS):
                return
            if any_rank(done >= _LEAST_ROUNDS and found.moved() < _STEADY):
                return
            for chain, rounds in zip(found.chains, found.rounds, strict=True):
                if len(rounds) > done:
                    continue
                essential = done == 0 and sum(map(bool, found.rounds)) < _ESSENTIAL
                over = time.monotonic() - start > budget_s
                if any_rank(over and not essential):
                    return
                if chain.has_long_slice:
                    # In training one step is like the one before. Here the chain before had other
                    # sizes, and claiming large pieces of memory anew would be timed: on CPUs, half
                    # as much again.
                    run_chain(stage, chain)
                rounds.append(run_chain(stage, chain))
                after_chain(found)


@contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients that are made inside are dropped at the end, those from before come back."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


class HeldBytes(NamedTuple):
    """What one token of one sequence keeps in memory on a stage, in bytes.

    Attributes:
        activations: from its forward to its backward, K and V apart.
        kv: keys and values of all layers.
    """

    activations: float
    kv: float


def held_bytes(stage: StageUnderTest, *, sequences: int, tokens: int) -> HeldBytes:
    """Counts what autograd saves for the backward of a slice that has a context.

    Args:
        stage: the stage.
        sequences: sequences that go together.
        tokens: of the slice; its context is as long.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters}
    context = SequenceContext()
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    scheme = SliceScheme([(sequences, [tokens, tokens])])
    loss = stage.loss(scheme) if stage.loss is not None else None
    # All alive until the end: a freed storage's address would be used again.
    outputs = []
    for index, cut in enumerate(scheme.groups[0].ranges()):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with current_slice(cut, context), stage.autocast():
                outputs.append(stage.run(stage.inputs(sequences, cut)))
            if loss is not None:
                loss.forward(0, index, outputs[-1])
    buffers = [
        tensor.untyped_storage()
        for layer in context.layers()
        for tensor in (layer.key, layer.value)
    ]
    kv = sum(buffer.nbytes() for buffer in buffers)
    apart = parameters | {buffer.data_ptr() for buffer in buffers}
    activations = sum(size for pointer, size in saved.items() if pointer not in apart)
    return HeldBytes(activations / (sequences * tokens), kv / (2 * sequences * tokens))


__all__ = [
    "Chain",
    "HeldBytes",
    "Measurements",
    "StageUnderTest",
    "chains",
    "held_bytes",
    "measure",
    "run_chain",
]
