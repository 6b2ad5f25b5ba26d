"""The state of one step: the loaded micro-batches, their groups and what each slice holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..schedule.order import Action
from ..scheme import SliceScheme, TokenRange
from .adapter import Tensors
from .channel import Slot
from .kv_context import SequenceContext
from .loss import MicroBatchLoss
from .weight_grads import Work


@dataclass
class GroupState:
    """One group of a loaded micro-batch: what a schedule calls a micro-batch.

    Attributes:
        micro_batch: the loaded micro-batch it belongs to.
        index: its place among that micro-batch's groups.
        rows: its sequences.
        ranges: the tokens of each slice.
        share: of the micro-batch's sequences.
        context: the K and V of its earlier slices.
        inputs: the stage's inputs of each slice in flight.
        outputs: the stage's outputs of each slice in flight.
        output_grads: their gradients, where they have come.
        owed: weight gradients of each slice that have been put off.
    """

    micro_batch: int
    index: int
    rows: slice
    ranges: list[TokenRange]
    share: float = 1.0
    context: SequenceContext = field(init=False)
    inputs: dict[int, Tensors] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    output_grads: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    owed: dict[int, list[Work]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free_context()

    @property
    def sequences(self) -> int:
        return self.rows.stop - self.rows.start

    def free_context(self) -> None:
        """Drops the K and V, and dK and dV, of all layers."""
        self.context = SequenceContext(self.share)

    def release(self) -> None:
        """Frees the context and whatever slices still hold."""
        self.free_context()
        self.inputs.clear()
        self.outputs.clear()
        self.output_grads.clear()
        self.owed.clear()


@dataclass
class StepState:
    """One ``train_batch`` or ``eval_batch``.

    Attributes:
        training: whether slices run backward.
        schemes: for each loaded micro-batch how it is cut.
        inputs: for each loaded micro-batch the first stage's inputs; empty on other stages.
        losses: for each loaded micro-batch its loss; empty before the last stage.
        groups: all groups, in the schedule's order.
        due: weight gradients of slices that are done together, so far.
    """

    training: bool
    schemes: list[SliceScheme]
    inputs: list[Tensors]
    losses: list[MicroBatchLoss]
    groups: list[GroupState] = field(init=False)
    due: list[list[Work]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = [
            GroupState(
                micro_batch,
                index,
                rows,
                group.ranges(),
                share=group.sequences / scheme.sequences,
            )
            for micro_batch, scheme in enumerate(self.schemes)
            for index, (rows, group) in enumerate(zip(scheme.rows(), scheme.groups, strict=True))
        ]

    @property
    def slices(self) -> list[int]:
        """The number of slices of every group."""
        return [len(group.ranges) for group in self.groups]

    def slot(self, action: Action) -> Slot:
        """The message that brings an action its input."""
        group = self.groups[action.micro_batch]
        length = group.ranges[action.slice].length
        return Slot(action.micro_batch, action.slice, group.sequences, length)

    def release(self) -> None:
        """Frees everything that the step holds."""
        for group in self.groups:
            group.release()
        self.inputs.clear()
        self.losses.clear()
        self.due.clear()
