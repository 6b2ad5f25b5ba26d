"""Lowering: which instructions a stage runs for its actions, in which order."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from terapipe_ds.schedule.lower import TokenSliceSchedule, lower
from terapipe_ds.schedule.order import actions

END = ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


def steps_of(steps: list[list[PipeInstruction]]) -> list[list[str]]:
    """Every instruction as its name and, where it is about a slice, ``micro_batch.slice``."""
    return [
        [
            f"{instruction.name} {instruction.micro_batch}.{instruction.slice}"
            if hasattr(instruction, "slice")
            else instruction.name
            for instruction in step
        ]
        for step in steps
    ]


EXPECTED = {
    "first": [
        ["ForwardSlice 0.0", "SendActivationSlice 0.0"],
        ["ForwardSlice 0.1", "SendActivationSlice 0.1"],
        ["RecvGradSlice 0.1", "BackwardSlice 0.1"],
        ["RecvGradSlice 0.0", "BackwardSlice 0.0"],
        END,
    ],
    "middle": [
        ["RecvActivationSlice 0.0", "ForwardSlice 0.0", "SendActivationSlice 0.0"],
        ["RecvActivationSlice 0.1", "ForwardSlice 0.1", "SendActivationSlice 0.1"],
        ["RecvGradSlice 0.1", "BackwardSlice 0.1", "SendGradSlice 0.1"],
        ["RecvGradSlice 0.0", "BackwardSlice 0.0", "SendGradSlice 0.0"],
        END,
    ],
    "last": [
        ["RecvActivationSlice 0.0", "ForwardSlice 0.0"],
        ["RecvActivationSlice 0.1", "ForwardSlice 0.1"],
        ["BackwardSlice 0.1", "SendGradSlice 0.1"],
        ["BackwardSlice 0.0", "SendGradSlice 0.0"],
        END,
    ],
}


@pytest.mark.parametrize(("stage", "which"), list(enumerate(EXPECTED)))
def test_training(stage: int, which: str) -> None:
    order = actions("1f1b", 3, 1, 2)
    assert steps_of(lower(order[stage], stage=stage, stages=3)) == EXPECTED[which]


def test_one_stage_transfers_nothing() -> None:
    (order,) = actions("1f1b", 1, 1, 2)
    assert steps_of(lower(order, stage=0, stages=1)) == [
        ["ForwardSlice 0.0"],
        ["ForwardSlice 0.1"],
        ["BackwardSlice 0.1"],
        ["BackwardSlice 0.0"],
        END,
    ]


@pytest.mark.parametrize(("stage", "which"), list(enumerate(EXPECTED)))
def test_forward_only_has_no_optimizer_step(stage: int, which: str) -> None:
    order = actions("forward", 3, 1, 2)
    assert steps_of(lower(order[stage], stage=stage, stages=3)) == EXPECTED[which][:2]


def test_sends_of_a_stage_meet_the_receives_of_the_next_in_order() -> None:
    lowered = [
        [instruction for step in lower(row, stage=stage, stages=3) for instruction in step]
        for stage, row in enumerate(actions("1f1b", 3, 3, [2, 1, 3]))
    ]

    def slices(stage: int, name: str) -> list[tuple[int, int]]:
        return [(i.micro_batch, i.slice) for i in lowered[stage] if i.name == name]

    for stage in (0, 1):
        sent = slices(stage, "SendActivationSlice")
        assert len(sent) == 6
        assert sent == slices(stage + 1, "RecvActivationSlice")
        sent = slices(stage + 1, "SendGradSlice")
        assert len(sent) == 6
        assert sent == slices(stage, "RecvGradSlice")


def test_schedule_iterates() -> None:
    order = actions("1f1b", 3, 1, 2)
    schedule = TokenSliceSchedule(order[1], micro_batches=1, stages=3, stage_id=1)
    assert steps_of(list(schedule)) == EXPECTED["middle"]
    assert steps_of(list(schedule.steps())) == EXPECTED["middle"]
    assert schedule.num_pipe_buffers() == 0
    assert (schedule.num_stages, schedule.num_micro_batches, schedule.stage) == (3, 1, 1)
