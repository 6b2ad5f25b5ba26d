"""Times an order of slices: an event-driven simulation of the very lists that the engine runs.

Every stage works through its actions in order. An action starts when the stage is free and its
input is there: the activation of the stage before for a forward, the gradient of the stage after
for a backward. A message occupies its channel (one for each neighbour and direction, as in the
engine) for its transfer time and arrives after the latency on top; where transfers overlap
computation the sender goes on at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError, ScheduleError
from .order import Action, Kind, Order, actions, released_by, slice_counts, splits_backward

SliceTime = tuple[float, ...]
"""(forward, backward) or (forward, input gradient, weight gradient) of a slice, in ms."""

Duration = Callable[[int, Kind, int, int], float]
"""ms of (stage, kind, micro-batch, slice)."""


class Event(NamedTuple):
    """One action on one stage, with its times in ms from the start of the step."""

    stage: int
    action: Action
    start_ms: float
    stop_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        makespan_ms: from the first forward's start to the last action's end.
        busy_ms: for each stage the time that it computes.
        idle_ms: for each stage the rest of the makespan.
        bubble: for each stage the idle share.
        peak_in_flight: for each stage the most slices whose forward has run and whose backward (W,
            where the backward is split) has not.
        events: for each stage its actions, first to last.
        critical_path: the chain of actions that sets the makespan, first to last. Where one follows
            another on a different stage, the channel between them was busy in between, with the
            message of the first and, where messages queue, with later ones.
    """

    makespan_ms: float
    busy_ms: list[float]
    idle_ms: list[float]
    bubble: list[float]
    peak_in_flight: list[int]
    events: list[list[Event]]
    critical_path: list[Event]


def simulate(
    name: str,
    times: Sequence[Sequence[SliceTime]] | Duration,
    *,
    stages: int,
    micro_batches: int | None = None,
    slices: int | Sequence[int] | None = None,
    warmup: int = 0,
    transfer: float | Duration = 0.0,
    latency_ms: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """Simulates a named schedule.

    Args:
        name: of the schedule, see :func:`~terapipe_ds.schedule.actions`.
        times: for each micro-batch a list with one ``(forward, backward)`` or
            ``(forward, input gradient, weight gradient)`` for each slice, the same on all stages;
            or a function of ``(stage, kind, micro_batch, slice)``. In ms.
        stages: the number of stages.
        micro_batches: needed, with ``slices``, if ``times`` is a function.
        slices: the number of slices, one for all micro-batches or one for each.
        warmup: how many more slices a stage may hold, see :func:`~terapipe_ds.schedule.actions`.
        transfer: ms that a message occupies its channel; a number, or a function of the sending
            action.
        latency_ms: time that a message takes on top, in which the channel is free.
        overlap: whether the sender computes while it sends.

    Raises:
        ConfigError: if times are missing, negative or not finite.
    """
    if callable(times):
        if micro_batches is None or slices is None:
            raise ConfigError(
                "simulate: found times as a function without micro_batches and slices, allowed are "
                "all three; give micro_batches= and slices="
            )
        counts = slice_counts(micro_batches, slices)
    else:
        counts = [len(micro_batch) for micro_batch in times]
        if micro_batches not in (None, len(counts)) or (
            slices is not None and slice_counts(len(counts), slices) != counts
        ):
            raise ConfigError(
                f"simulate: found times of {counts} slices for micro_batches={micro_batches} and "
                f"slices={slices}, allowed is the same number in both; leave these out"
            )
        counts = slice_counts(len(counts), counts)
    order = actions(name, stages, len(counts), counts, warmup=warmup)
    duration = times if callable(times) else _table(times, split=splits_backward(name))
    return simulate_order(
        order, duration, transfer=transfer, latency_ms=latency_ms, overlap=overlap
    )


def simulate_order(
    order: Order,
    duration: Duration,
    *,
    transfer: float | Duration = 0.0,
    latency_ms: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """Simulates any order of actions; arguments as for :func:`simulate`.

    Raises:
        ScheduleError: if the order has a deadlock.
        ConfigError: if a time is negative or not finite.
    """
    order = [[Action(*action) for action in row] for row in order]
    if not 0.0 <= latency_ms < math.inf:
        raise ConfigError(
            f"simulate: found {latency_ms} ms as latency_ms, allowed are finite times of at least 0"
        )
    stages = len(order)
    starts: list[list[float]] = [[] for _ in order]
    stops: list[list[float]] = [[] for _ in order]
    # For each action what it waited for longest: an earlier (stage, index), or nothing.
    causes: list[list[tuple[int, int] | None]] = [[] for _ in order]
    clock = [0.0] * stages
    # (receiving stage, kind, micro-batch, slice) -> when its input is there, and from where.
    inbox: dict[tuple[int, Kind, int, int], tuple[float, tuple[int, int]]] = {}
    # When a channel is free, and the action that made it busy when it last was idle.
    channels: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}

    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        row = order[stage]
        index = len(stops[stage])
        while index < len(row):
            kind, micro_batch, slice_index = row[index]
            source, target = _neighbours(kind, stage, stages)
            start = clock[stage]
            cause = (stage, index - 1) if index else None
            if source is not None:
                message = inbox.pop((stage, kind, micro_batch, slice_index), None)
                if message is None:
                    break
                if message[0] > start:
                    start, cause = message
            stop = start + _checked(duration(stage, kind, micro_batch, slice_index), row[index])
            starts[stage].append(start)
            stops[stage].append(stop)
            causes[stage].append(cause)
            clock[stage] = stop
            if target is not None:
                occupied = (
                    transfer(stage, kind, micro_batch, slice_index)
                    if callable(transfer)
                    else transfer
                )
                free, origin = channels.get((stage, target), (0.0, (stage, index)))
                if stop >= free:
                    free, origin = stop, (stage, index)
                sent = free + _checked(occupied, row[index])
                channels[stage, target] = sent, origin
                if not overlap:
                    clock[stage] = sent
                inbox[target, kind, micro_batch, slice_index] = (sent + latency_ms, origin)
                ready.append(target)
            index += 1
    for stage, row in enumerate(order):
        if len(stops[stage]) < len(row):
            raise ScheduleError(
                f"stage {stage}: {row[len(stops[stage])]} never gets its input; check the order "
                "with terapipe_ds.schedule.check"
            )
    events = [
        [Event(stage, *entry) for entry in zip(row, starts[stage], stops[stage], strict=True)]
        for stage, row in enumerate(order)
    ]
    makespan = max((row[-1] for row in stops if row), default=0.0)
    busy = [math.fsum(event.stop_ms - event.start_ms for event in row) for row in events]
    return Timeline(
        makespan_ms=makespan,
        busy_ms=busy,
        idle_ms=[makespan - each for each in busy],
        bubble=[1 - each / makespan if makespan else 0.0 for each in busy],
        peak_in_flight=[_peak(row) for row in order],
        events=events,
        critical_path=_critical_path(events, causes),
    )


def lower_bound(order: Order, duration: Duration) -> float:
    """ms that no run of an order can be shorter than, however fast messages are.

    Before a stage's first action its slice has come through all stages before. From then on the
    stage works without a pause at best. After its last backward, that slice goes back through all
    stages before. See ``docs/schedules.md``.

    Args:
        order: the actions of every stage.
        duration: ms of (stage, kind, micro-batch, slice).
    """
    bound = 0.0
    for stage, row in enumerate(order):
        if not row:
            continue
        work = [duration(stage, *action) for action in row]
        fill = math.fsum(duration(before, *row[0]) for before in range(stage))
        bound = max(bound, fill + math.fsum(work))
        backwards = [index for index, action in enumerate(row) if action.kind == "B"]
        if backwards:
            last = row[backwards[-1]]
            drain = math.fsum(duration(before, *last) for before in range(stage))
            bound = max(bound, fill + math.fsum(work[: backwards[-1] + 1]) + drain)
    return bound


def _neighbours(kind: Kind, stage: int, stages: int) -> tuple[int | None, int | None]:
    """The stages that an action's input comes from and its result goes to."""
    if kind == "W":
        return None, None
    step = 1 if kind == "F" else -1
    source, target = stage - step, stage + step
    return (
        source if 0 <= source < stages else None,
        target if 0 <= target < stages else None,
    )


def _table(times: Sequence[Sequence[SliceTime]], *, split: bool) -> Duration:
    for micro_batch in times:
        for slice_time in micro_batch:
            if len(slice_time) != 3 and (split or len(slice_time) != 2):
                raise ConfigError(
                    f"simulate: found the times {slice_time!r} of a slice, allowed are (forward, "
                    "input gradient, weight gradient) or, where the schedule does not split the "
                    "backward, (forward, backward)"
                )

    def duration(stage: int, kind: Kind, micro_batch: int, slice_index: int) -> float:
        forward, *backward = times[micro_batch][slice_index]
        if kind == "F":
            return forward
        if kind == "W":
            return backward[1]
        return backward[0] if split else math.fsum(backward)

    return duration


def _checked(ms: float, action: Action) -> float:
    if not (0.0 <= ms < math.inf):
        raise ConfigError(
            f"simulate: found {ms} ms for {action}, allowed are finite times of at least 0"
        )
    return ms


def _peak(row: Sequence[Action]) -> int:
    released = released_by(row)
    in_flight = peak = 0
    for action in row:
        if action.kind == "F":
            in_flight += 1
            peak = max(peak, in_flight)
        elif action.kind == released:
            in_flight -= 1
    return peak


def _critical_path(
    events: Sequence[Sequence[Event]], causes: Sequence[Sequence[tuple[int, int] | None]]
) -> list[Event]:
    last = max(
        ((row[-1].stop_ms, stage) for stage, row in enumerate(events) if row), default=(0.0, -1)
    )
    stage = last[1]
    place: tuple[int, int] | None = (stage, len(events[stage]) - 1) if stage >= 0 else None
    path = []
    while place is not None:
        stage, index = place
        path.append(events[stage][index])
        place = causes[stage][index]
    return path[::-1]
