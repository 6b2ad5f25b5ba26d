"""Lowers a stage's actions to the ``PipeInstruction`` lists that a DeepSpeed engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)

from .instructions import (
    BackwardInput,
    BackwardSlice,
    BackwardWeight,
    ForwardSlice,
    RecvActivationSlice,
    RecvGradSlice,
    SendActivationSlice,
    SendGradSlice,
)
from .order import Action, joins_next


def lower(actions: Sequence[Action], *, stage: int, stages: int) -> list[list[PipeInstruction]]:
    """Adds to every action the transfers with the neighbouring stages, one step an action.

    Args:
        actions: one stage's actions, from ``order.actions``.
        stage: that stage, from 0.
        stages: the number of stages.

    Returns:
        For every action its instructions: receive, compute, send.
    """
    upstream, downstream = stage > 0, stage < stages - 1
    trains = any(action.kind == "B" for action in actions)
    backward = BackwardInput if any(action.kind == "W" for action in actions) else BackwardSlice
    steps: list[list[PipeInstruction]] = []
    for action, joins in zip(actions, joins_next(actions), strict=True):
        slot = {"micro_batch": action.micro_batch, "slice": action.slice}
        step: list[PipeInstruction] = []
        if action.kind == "F":
            if upstream:
                step.append(RecvActivationSlice(**slot))
            step.append(ForwardSlice(**slot))
            if downstream:
                step.append(SendActivationSlice(**slot))
        elif action.kind == "W":
            step.append(BackwardWeight(**slot, joins_next=joins))
        else:
            if downstream:
                step.append(RecvGradSlice(**slot))
            step.append(backward(**slot))
            if upstream:
                step.append(SendGradSlice(**slot))
        steps.append(step)
    if trains:
        steps.append([ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])
    return steps


class TokenSliceSchedule(PipeSchedule):
    """A stage's slices as a DeepSpeed schedule.

    Args:
        actions: the stage's actions.
        micro_batches: the number of micro-batches that DeepSpeed loads for this step.
        stages: the number of stages.
        stage_id: this stage.
    """

    def __init__(
        self, actions: Sequence[Action], *, micro_batches: int, stages: int, stage_id: int
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.actions = actions
        self._lowered = lower(actions, stage=stage_id, stages=stages)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One step an action, then the optimizer step where the schedule trains."""
        yield from self._lowered

    def num_pipe_buffers(self) -> int:
        """None: slices live in the engine's own step state, not in DeepSpeed's cyclic buffers."""
        return 0
