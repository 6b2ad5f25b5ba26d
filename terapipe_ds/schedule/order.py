"""The order of slices on every stage, as plain data. No schedule logic lives anywhere else.

The engine runs these lists (lowered by ``lower.py``), the checker proves them, the simulator times
them. Everything counts from 0. Where a scheme has several groups, each group is a micro-batch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import ConfigError

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One piece of a stage's work: the forward or the backward of one slice.

    Where a schedule splits the backward, ``B`` is the gradient of the slice's inputs, which the
    stage before waits for, and ``W`` that of the weights, which nothing waits for.
    """

    kind: Kind
    micro_batch: int
    slice: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.slice}"


Order = list[list[Action]]
"""For every stage its actions, first to last."""


def slice_counts(micro_batches: int, slices: int | Sequence[int]) -> list[int]:
    """The number of slices of every micro-batch.

    Args:
        micro_batches: the number of micro-batches.
        slices: one number for all micro-batches, or one for each.

    Raises:
        ConfigError: if a number is below 1 or there is not one for each micro-batch.
    """
    counts: list[Any] = []
    if isinstance(slices, int):
        counts = [slices] * micro_batches
    elif isinstance(slices, Sequence):
        counts = list(slices)
    numbers = all(type(count) is int and count >= 1 for count in counts)
    if micro_batches < 1 or len(counts) != micro_batches or not numbers:
        raise ConfigError(
            f"schedule: found {micro_batches} micro-batches with {slices} slices, allowed are at "
            "least 1 micro-batch and, for each, at least 1 slice"
        )
    return counts


def actions(name: str, stages: int, micro_batches: int, slices: int | Sequence[int]) -> Order:
    """The actions of every stage.

    Args:
        name: ``"gpipe"`` (TeraPipe's own: all forwards, then all backwards reversed), ``"1f1b"``
            (slices ascending forward; backward by micro-batch, its slices descending),
            ``"zb-h1"`` (as 1f1b, with weight gradients apart and later) or ``"forward"``
            (evaluation: no backward).
        stages: the number of pipeline stages.
        micro_batches: the number of micro-batches.
        slices: the number of slices, one for all micro-batches or one for each.

    Returns:
        For each stage a list of ``(kind, micro_batch, slice)``.

    Raises:
        ConfigError: if the name is unknown or a number is below 1.
    """
    schedule = _schedule(name)
    if stages < 1:
        raise ConfigError(f"schedule: found {stages} stages, allowed is at least 1")
    counts = slice_counts(micro_batches, slices)
    return [schedule.stage_actions(stage, stages, counts) for stage in range(stages)]


def in_flight_bound(
    name: str, *, stage: int, stages: int, micro_batches: int, slices: int | Sequence[int]
) -> int:
    """The most slices whose forward has run and whose backward has not, on one stage.

    Where the backward is split, a slice counts until its weight gradient.
    """
    if not 0 <= stage < stages:
        raise ConfigError(
            f"schedule: found stage {stage} of {stages}, allowed are 0 to {stages - 1}"
        )
    counts = slice_counts(micro_batches, slices)
    return _schedule(name).bound(stage, stages, counts)


def released_by(row: Sequence[Action]) -> Kind:
    """The kind of action after which a stage holds a slice no more."""
    return "W" if any(action.kind == "W" for action in row) else "B"


def _forwards(counts: Sequence[int]) -> list[Action]:
    return [Action("F", d, s) for d, count in enumerate(counts) for s in range(count)]


def _backwards(counts: Sequence[int]) -> list[Action]:
    return [Action("B", d, s) for d, count in enumerate(counts) for s in reversed(range(count))]


def _forward_only(stage: int, stages: int, counts: Sequence[int]) -> list[Action]:
    return _forwards(counts)


def _gpipe(stage: int, stages: int, counts: Sequence[int]) -> list[Action]:
    forwards = _forwards(counts)
    return forwards + [Action("B", d, s) for _, d, s in reversed(forwards)]


def _one_forward_one_backward(stage: int, stages: int, counts: Sequence[int]) -> list[Action]:
    """1F1B over slices.

    The last stage runs a backward as soon as its micro-batch's forwards are done, and one more
    forward before each next one. Stage ``k`` runs ``K - 1 - k`` forwards further ahead, the time
    that a slice needs to the last stage and back.
    """
    forwards, backwards = _forwards(counts), _backwards(counts)
    ahead = stages - 1 - stage
    order: list[Action] = []
    done = 0
    needed = 0
    ends = 0
    for backward in backwards:
        if backward.slice == counts[backward.micro_batch] - 1:
            ends += counts[backward.micro_batch]
        needed = max(ends, needed + 1)
        until = min(len(forwards), needed + ahead)
        order += forwards[done:until]
        done = max(done, until)
        order.append(backward)
    return order


def _zero_bubble_h1(stage: int, stages: int, counts: Sequence[int]) -> list[Action]:
    """ZB-H1 over slices (Qi et al., arXiv 2401.10241): 1F1B, its weight gradients later.

    Stage ``k`` may owe ``k`` weight gradients. Later stages, which 1F1B lets hold fewer slices,
    thus hold as many as the first, and have work left for the time in which the last backwards
    travel to the first stage.
    """
    order: list[Action] = []
    owed: list[Action] = []
    for action in _one_forward_one_backward(stage, stages, counts):
        order.append(action)
        if action.kind == "B":
            owed.append(action._replace(kind="W"))
            if len(owed) > stage:
                order.append(owed.pop(0))
    return order + owed


def _all_in_flight(stage: int, stages: int, counts: Sequence[int]) -> int:
    return sum(counts)


def _bound_1f1b(stage: int, stages: int, counts: Sequence[int]) -> int:
    return min(sum(counts), stages - stage + max(counts) - 1)


def _bound_zero_bubble_h1(stage: int, stages: int, counts: Sequence[int]) -> int:
    return min(sum(counts), stages + max(counts) - 1)


def splits_backward(name: str) -> bool:
    """Whether a schedule has weight gradients apart."""
    return any(action.kind == "W" for action in _schedule(name).stage_actions(0, 1, [1]))


class _Schedule(NamedTuple):
    stage_actions: Callable[[int, int, Sequence[int]], list[Action]]
    bound: Callable[[int, int, Sequence[int]], int]


_SCHEDULES = {
    "1f1b": _Schedule(_one_forward_one_backward, _bound_1f1b),
    "gpipe": _Schedule(_gpipe, _all_in_flight),
    "zb-h1": _Schedule(_zero_bubble_h1, _bound_zero_bubble_h1),
    "forward": _Schedule(_forward_only, _all_in_flight),
}


def _schedule(name: str) -> _Schedule:
    if name not in _SCHEDULES:
        raise ConfigError(
            f"schedule: found {name!r}, allowed are {', '.join(map(repr, sorted(_SCHEDULES)))}"
        )
    return _SCHEDULES[name]
