"""What a step of a scheme takes, by simulation, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..schedule.order import Action, Kind, Order, actions, joins_next
from ..schedule.simulator import Timeline, simulate_order
from ..scheme import Group, SliceScheme
from .cost import CostModel
from .dp import Cost


def predict(
    cost: Cost,
    scheme: SliceScheme,
    *,
    stages: int,
    schedule: str,
    micro_batches: int = 1,
    warmup: int = 0,
) -> Timeline:
    """Simulates a step of a scheme with each stage's own costs.

    Args:
        cost: as for :func:`plan`.
        scheme: the groups of a micro-batch.
        stages: the number of pipeline stages.
        schedule: its name.
        micro_batches: how often the scheme is repeated.
        warmup: the schedule's slack.
    """
    groups = scheme.groups * micro_batches
    order = _order(schedule, stages, groups, warmup)
    times = [_StageTimes(cost, stage, stages, groups, row) for stage, row in enumerate(order)]

    def duration(stage: int, kind: Kind, micro_batch: int, index: int) -> float:
        return times[stage].ms(Action(kind, micro_batch, index))

    if not isinstance(cost, CostModel):
        return simulate_order(order, duration)

    def transfer(stage: int, kind: Kind, micro_batch: int, index: int) -> float:
        group = groups[micro_batch]
        return cost.transfer.occupied_ms(group.sequences * group.lengths[index])

    return simulate_order(order, duration, transfer=transfer, latency_ms=cost.transfer.latency_ms)


def peak_memory(
    cost: CostModel,
    scheme: SliceScheme,
    *,
    stages: int,
    schedule: str,
    micro_batches: int = 1,
    warmup: int = 0,
) -> list[float] | None:
    """For each stage the most bytes at any time of a step; None if the costs do not know."""
    if not knows_memory(cost, stages):
        return None
    groups = scheme.groups * micro_batches
    peaks = []
    for stage, row in enumerate(_order(schedule, stages, groups, warmup)):
        memory = cost.stage(stage, stages).memory
        assert memory is not None
        peaks.append(memory.peak(row, groups))
    return peaks


class _StageTimes:
    """ms of a stage's actions.

    Args:
        cost: as for :func:`predict`.
        stage: the stage.
        stages: the number of pipeline stages.
        groups: the groups of the step.
        row: the stage's actions.
    """

    def __init__(
        self,
        cost: Cost,
        stage: int,
        stages: int,
        groups: Sequence[Group],
        row: Sequence[Action],
    ) -> None:
        self._groups = groups
        self._cost = cost.stage(stage, stages) if isinstance(cost, CostModel) else _Alike(cost)
        self._splits = any(action.kind == "W" for action in row)
        self._of_slices = {group: self._times(group) for group in set(groups)}
        self._joint: dict[tuple[Group, range], float] = {}
        self._done_with = _weights_done_with(row)

    def ms(self, action: Action) -> float:
        """The action's time; of weight gradients that are done together, at the last of them."""
        kind, micro_batch, index = action
        group = self._groups[micro_batch]
        if kind != "W":
            return self._of_slices[group][kind][index]
        slices = self._done_with[action]
        if len(slices) == 1:
            return self._of_slices[group]["W"][slices[0]]
        if slices and (group, slices) not in self._joint:
            self._joint[group, slices] = self._joint_weight(group, slices)
        return self._joint[group, slices] if slices else 0.0

    def _times(self, group: Group) -> dict[Kind, list[float]]:
        at = np.array(group.lengths), np.array([t.start for t in group.ranges()]), group.sequences
        backward, weight = self._cost.backward(*at), self._cost.weight_share(*at)
        return {
            "F": self._cost.forward(*at).tolist(),
            "B": (backward - weight if self._splits else backward).tolist(),
            "W": weight.tolist(),
        }

    def _joint_weight(self, group: Group, slices: range) -> float:
        """Of a linear layer's weight: one product over all tokens, whatever came before them."""
        ranges = group.ranges()
        tokens = sum(ranges[index].length for index in slices)
        start = ranges[slices[0]].start
        return float(self._cost.weight_share(tokens, start, group.sequences))


def _weights_done_with(row: Sequence[Action]) -> dict[Action, range]:
    """For each W of a stage the slices of its micro-batch whose products it does.

    None where a later W does them; see ``order.joins_next``.
    """
    done: dict[Action, range] = {}
    waiting: list[int] = []
    for place, (action, joins) in enumerate(zip(row, joins_next(row), strict=True)):
        if action.kind != "W":
            continue
        waiting.append(action.slice)
        if joins and row[place + 1].micro_batch == action.micro_batch:
            done[action] = range(0)
            continue
        done[action] = range(min(waiting), max(waiting) + 1)
        waiting = []
    return done


class _Alike:
    """A stage of costs that do not know stages, nor a forward from a backward.

    All three products of a layer take the same time.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def forward(self, length: Any, context: Any, sequences: Any) -> Any:
        both = self._cost.time(length, context, sequences)
        return np.broadcast_to(both, np.shape(length)) / 3

    def backward(self, length: Any, context: Any, sequences: Any) -> Any:
        return 2 * self.forward(length, context, sequences)

    weight_share = forward


def knows_memory(cost: Cost, stages: int) -> bool:
    """Whether costs say what every stage holds."""
    return isinstance(cost, CostModel) and all(
        cost.stage(stage, stages).memory is not None for stage in range(stages)
    )


def _order(schedule: str, stages: int, groups: Sequence[Group], warmup: int) -> Order:
    counts = [len(group.lengths) for group in groups]
    return actions(schedule, stages, len(groups), counts, warmup=warmup)


__all__ = ["knows_memory", "peak_memory", "predict"]
