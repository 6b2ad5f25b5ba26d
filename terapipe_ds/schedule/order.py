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


def actions(
    name: str,
    stages: int,
    micro_batches: int,
    slices: int | Sequence[int],
    *,
    warmup: int = 0,
) -> Order:
    """The actions of every stage.

    Args:
        name: ``"gpipe"`` (TeraPipe's own: all forwards, then all backwards reversed), ``"1f1b"``
            (slices ascending forward; backward by micro-batch, its slices descending),
            ``"zb-h1"`` (as 1f1b, with weight gradients apart and later) or ``"forward"``
            (evaluation: no backward).
        stages: the number of pipeline stages.
        micro_batches: the number of micro-batches.
        slices: the number of slices, one for all micro-batches or one for each.
        warmup: how many more slices a stage may hold, see ``docs/schedules.md``; only for
            schedules in which forwards take turns with backwards.

    Returns:
        For each stage a list of ``(kind, micro_batch, slice)``.

    Raises:
        ConfigError: if the name is unknown or a number is too small.
    """
    schedule = _schedule(name)
    if stages < 1:
        raise ConfigError(f"schedule: found {stages} stages, allowed is at least 1")
    check_warmup(name, warmup)
    counts = slice_counts(micro_batches, slices)
    return [schedule.stage_actions(Place(stage, stages, warmup), counts) for stage in range(stages)]


def check_warmup(name: str, warmup: int) -> None:
    """Raises if a schedule cannot have so much slack.

    Raises:
        ConfigError: for an unknown schedule, a number that is no integer of at least 0, or any
            slack for a schedule that runs all forwards first.
    """
    has_use = takes_turns(name)
    if type(warmup) is not int or warmup < 0:
        raise ConfigError(f"warmup: found {warmup!r}, allowed are integers of at least 0")
    if warmup and not has_use:
        turns = ", ".join(repr(each) for each in sorted(_SCHEDULES) if takes_turns(each))
        raise ConfigError(
            f"warmup: found {warmup} with the schedule {name!r}, which runs all forwards first, "
            f"allowed is 0, or the schedules {turns}; change warmup or schedule"
        )


def takes_turns(name: str) -> bool:
    """Whether a schedule runs backwards between forwards, so that slack changes it."""
    return _schedule(name).takes_turns


def in_flight_bound(
    name: str,
    *,
    stage: int,
    stages: int,
    micro_batches: int,
    slices: int | Sequence[int],
    warmup: int = 0,
) -> int:
    """The most slices whose forward has run and whose backward has not, on one stage.

    Where the backward is split, a slice counts until its weight gradient.
    """
    if not 0 <= stage < stages:
        raise ConfigError(
            f"schedule: found stage {stage} of {stages}, allowed are 0 to {stages - 1}"
        )
    counts = slice_counts(micro_batches, slices)
    check_warmup(name, warmup)
    return _schedule(name).bound(Place(stage, stages, warmup), counts)


def released_by(row: Sequence[Action]) -> Kind:
    """The kind of action after which a stage holds a slice no more."""
    return "W" if any(action.kind == "W" for action in row) else "B"


def _forwards(counts: Sequence[int]) -> list[Action]:
    return [Action("F", d, s) for d, count in enumerate(counts) for s in range(count)]


def _backwards(counts: Sequence[int]) -> list[Action]:
    return [Action("B", d, s) for d, count in enumerate(counts) for s in reversed(range(count))]


class Place(NamedTuple):
    """A stage in its pipeline, and the slack that its schedule is given."""

    stage: int
    stages: int
    warmup: int

    @property
    def ahead(self) -> int:
        """How many forwards it runs ahead of the last stage.

        One for each hop to there, the time that a slice needs to the last stage and back; and of
        the slack, which all hops share, as much as lies before it.
        """
        hops = self.stages - 1 - self.stage
        return hops + (self.warmup * hops // (self.stages - 1) if hops else 0)


def _forward_only(place: Place, counts: Sequence[int]) -> list[Action]:
    return _forwards(counts)


def _gpipe(place: Place, counts: Sequence[int]) -> list[Action]:
    forwards = _forwards(counts)
    return forwards + [Action("B", d, s) for _, d, s in reversed(forwards)]


def _one_forward_one_backward(place: Place, counts: Sequence[int]) -> list[Action]:
    """1F1B over slices.

    The last stage runs a backward as soon as its micro-batch's forwards are done, and one more
    forward before each next one. The others run further ahead, see ``Place.ahead``.
    """
    forwards, backwards = _forwards(counts), _backwards(counts)
    order: list[Action] = []
    done = 0
    needed = 0
    ends = 0
    for backward in backwards:
        if backward.slice == counts[backward.micro_batch] - 1:
            ends += counts[backward.micro_batch]
        needed = max(ends, needed + 1)
        until = min(len(forwards), needed + place.ahead)
        order += forwards[done:until]
        done = max(done, until)
        order.append(backward)
    return order


def _zero_bubble_h1(place: Place, counts: Sequence[int]) -> list[Action]:
    """ZB-H1 over slices (Qi et al., arXiv 2401.10241): 1F1B, its weight gradients later.

    Stage ``k`` may owe ``k`` weight gradients. Later stages, which 1F1B lets hold fewer slices,
    thus hold as many as the first, and have work left for the time in which the last backwards
    travel to the first stage. Slack that a stage does not need for forwards it may owe.

    Those of a micro-batch follow one another where they may, see ``joins_next``.
    """
    order: list[Action] = []
    owed: list[Action] = []
    may_owe = place.stages - 1 + place.warmup - place.ahead
    joins = _joins_weights(place, counts)
    for action in _one_forward_one_backward(place, counts):
        order.append(action)
        if action.kind != "B":
            continue
        owed.append(action._replace(kind="W"))
        if joins and action.slice > 0:
            continue
        while len(owed) > may_owe:
            oldest = owed[0].micro_batch
            count = sum(each.micro_batch == oldest for each in owed) if joins else 1
            order += owed[:count]
            del owed[:count]
    return order + owed


def _joins_weights(place: Place, counts: Sequence[int]) -> bool:
    """Whether a micro-batch's weight gradients wait for the last of its backwards.

    With several micro-batches, but fewer than stages, so much work at once would keep the last
    backwards from the stages before.
    """
    return len(counts) == 1 or len(counts) >= place.stages


def joins_next(row: Sequence[Action]) -> list[bool]:
    """For every action of a stage whether it is a W that is done together with the W after it.

    One product over the tokens of several slices takes less time than one for each.
    """
    after = [*row[1:], None]
    return [
        action.kind == "W" and following is not None and following.kind == "W"
        for action, following in zip(row, after, strict=True)
    ]


def _all_in_flight(place: Place, counts: Sequence[int]) -> int:
    return sum(counts)


def _bound_1f1b(place: Place, counts: Sequence[int]) -> int:
    return min(sum(counts), place.ahead + max(counts))


def _bound_zero_bubble_h1(place: Place, counts: Sequence[int]) -> int:
    waiting = max(counts) - 1 if _joins_weights(place, counts) else 0
    return min(sum(counts), place.stages - 1 + place.warmup + max(counts) + waiting)


def splits_backward(name: str) -> bool:
    """Whether a schedule has weight gradients apart."""
    return any(action.kind == "W" for action in _schedule(name).stage_actions(Place(0, 1, 0), [1]))


class _Schedule(NamedTuple):
    stage_actions: Callable[[Place, Sequence[int]], list[Action]]
    bound: Callable[[Place, Sequence[int]], int]
    takes_turns: bool


_SCHEDULES = {
    "1f1b": _Schedule(_one_forward_one_backward, _bound_1f1b, takes_turns=True),
    "gpipe": _Schedule(_gpipe, _all_in_flight, takes_turns=False),
    "zb-h1": _Schedule(_zero_bubble_h1, _bound_zero_bubble_h1, takes_turns=True),
    "forward": _Schedule(_forward_only, _all_in_flight, takes_turns=False),
}


def _schedule(name: str) -> _Schedule:
    if name not in _SCHEDULES:
        raise ConfigError(
            f"schedule: found {name!r}, allowed are {', '.join(map(repr, sorted(_SCHEDULES)))}"
        )
    return _SCHEDULES[name]
