"""Proves that an order of slices is legal, or shows where it is not.

Rules, for every stage:

1. each slice has one F, then, where the schedule trains, one B, and then, where any backward is
   split, one W;
2. within a micro-batch F ascends (a slice attends to the earlier ones) and B descends (a slice's
   dK and dV are complete when all later slices have added theirs);
3. neighbouring stages run the F, and the B, in the same order, so that on each channel the order of
   sends is the order of receives;
4. nothing waits for ever;
5. the number of slices in flight keeps the schedule's bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ScheduleError
from .order import Action, Kind, Order, in_flight_bound, released_by, slice_counts

_KINDS: tuple[Kind, ...] = ("F", "B", "W")
_AFTER: dict[Kind, Kind] = {"B": "F", "W": "B"}


def check(
    order: Order,
    *,
    micro_batches: int,
    slices: int | Sequence[int],
    bounds: Sequence[int] | None = None,
) -> None:
    """Checks rules 1 to 4, and rule 5 where bounds are given.

    Args:
        order: the actions of every stage, each ``(kind, micro_batch, slice)``.
        micro_batches: the number of micro-batches.
        slices: the number of slices, one for all micro-batches or one for each.
        bounds: for each stage, the most slices in flight.

    Raises:
        ScheduleError: which rule is broken where, and the whole order with that place marked.
    """
    counts = slice_counts(micro_batches, slices)
    order = [[Action(*action) for action in stage_actions] for stage_actions in order]
    if not order or (bounds is not None and len(bounds) != len(order)):
        raise ScheduleError(
            f"found {len(order)} stages and {bounds} as bounds, allowed are at least 1 stage and, "
            "if any, one bound for each"
        )
    for stage, stage_actions in enumerate(order):
        _check_actions(order, stage, stage_actions, counts)
        _check_direction(order, stage, stage_actions)
    for stage, stage_actions in enumerate(order):
        _check_complete(order, stage, stage_actions, counts)
    _check_channels(order)
    _check_progress(order)
    for stage, bound in enumerate(bounds or ()):
        _check_in_flight(order, stage, bound)


def check_named(
    name: str,
    order: Order,
    *,
    micro_batches: int,
    slices: int | Sequence[int],
    warmup: int = 0,
) -> None:
    """:func:`check` with the bounds that the named schedule promises for so much slack."""
    stages = len(order)
    bounds = [
        in_flight_bound(
            name,
            stage=stage,
            stages=stages,
            micro_batches=micro_batches,
            slices=slices,
            warmup=warmup,
        )
        for stage in range(stages)
    ]
    check(order, micro_batches=micro_batches, slices=slices, bounds=bounds)


def grid(order: Order, culprit: tuple[int, int] | None = None) -> str:
    """The order as text, a row a stage and a column a step; the culprit stands in ``>`` ``<``.

    Args:
        order: the actions of every stage.
        culprit: the (stage, index) to mark.
    """
    rows = [[f" {action} " for action in stage_actions] for stage_actions in order]
    if culprit is not None:
        stage, index = culprit
        rows[stage][index] = f">{order[stage][index]}<"
    width = max((len(cell) for row in rows for cell in row), default=0)
    lines = [
        f"stage {stage:>2} |" + "".join(cell.ljust(width) for cell in row)
        for stage, row in enumerate(rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _fail(order: Order, stage: int, index: int, reason: str) -> None:
    raise ScheduleError(f"stage {stage}, step {index}: {reason}\n{grid(order, (stage, index))}")


def _check_actions(
    order: Order, stage: int, stage_actions: Sequence[Action], counts: Sequence[int]
) -> None:
    seen: set[Action] = set()
    for index, action in enumerate(stage_actions):
        if action in seen:
            _fail(order, stage, index, f"{action} runs twice")
        if action.kind not in _KINDS:
            _fail(order, stage, index, f"{action.kind!r} is not a kind of action")
        if not (
            0 <= action.micro_batch < len(counts) and 0 <= action.slice < counts[action.micro_batch]
        ):
            _fail(order, stage, index, f"{action} is not a slice of this batch")
        before = _AFTER.get(action.kind)
        if before is not None and action._replace(kind=before) not in seen:
            _fail(order, stage, index, f"{action} runs before {action._replace(kind=before)}")
        seen.add(action)


def _check_complete(
    order: Order, stage: int, stage_actions: Sequence[Action], counts: Sequence[int]
) -> None:
    kinds = {action.kind for stage_row in order for action in stage_row}
    needs: list[Kind] = [kind for kind in _KINDS if kind in kinds or kind == "F"]
    expected = {
        Action(kind, d, s) for d, count in enumerate(counts) for s in range(count) for kind in needs
    }
    missing = expected - set(stage_actions)
    if missing:
        raise ScheduleError(f"stage {stage}: {min(missing)} never runs\n{grid(order)}")


def _check_direction(order: Order, stage: int, stage_actions: Sequence[Action]) -> None:
    last: dict[tuple[str, int], int] = {}
    for index, action in enumerate(stage_actions):
        if action.kind == "W":
            continue
        key = (action.kind, action.micro_batch)
        if key in last:
            ascends = action.slice > last[key]
            if ascends != (action.kind == "F"):
                must = "ascend" if action.kind == "F" else "descend"
                _fail(order, stage, index, f"{action.kind} must {must} within a micro-batch")
        last[key] = action.slice


def _check_channels(order: Order) -> None:
    for stage in range(len(order) - 1):
        for kind in ("F", "B"):
            here = [action for action in order[stage] if action.kind == kind]
            there = [action for action in order[stage + 1] if action.kind == kind]
            for sent, received in zip(here, there, strict=True):
                if sent != received:
                    index = order[stage + 1].index(received)
                    _fail(order, stage + 1, index, f"stage {stage} has {sent} at this place")


def _check_progress(order: Order) -> None:
    """Runs every stage as far as its inputs allow until all are done or none can move."""
    position = [0] * len(order)
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for stage, stage_actions in enumerate(order):
            while position[stage] < len(stage_actions):
                action = stage_actions[position[stage]]
                source = _source(stage, action)
                waits = source != stage and 0 <= source < len(order)
                if waits and (source, action) not in done:
                    break
                done.add((stage, action))
                position[stage] += 1
                moved = True
    for stage, stage_actions in enumerate(order):
        if position[stage] < len(stage_actions):
            source = _source(stage, stage_actions[position[stage]])
            _fail(order, stage, position[stage], f"deadlock, it waits for stage {source} for ever")


def _source(stage: int, action: Action) -> int:
    """The stage that an action's input comes from; itself for a weight gradient."""
    return stage + {"F": -1, "B": 1, "W": 0}[action.kind]


def _check_in_flight(order: Order, stage: int, bound: int) -> None:
    in_flight = 0
    released = released_by(order[stage])
    for index, action in enumerate(order[stage]):
        in_flight += (action.kind == "F") - (action.kind == released)
        if in_flight > bound:
            _fail(order, stage, index, f"{in_flight} slices in flight, the bound is {bound}")
