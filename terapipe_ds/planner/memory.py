"""Bytes that a stage needs for a scheme under a schedule.

What lives through a step (parameters, gradients, optimizer state) is a number; what comes and goes
follows the stage's list of actions: a forward leaves its activations until the slice's backward, a
micro-batch's K and V come with its first slice's forward and go, with dK and dV, after its first
slice's backward. The peak thus depends on the order alone, not on times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule.order import Action, released_by
from ..scheme import Group

GIB = 2**30


@dataclass(frozen=True)
class StageMemory:
    """What one rank of a stage holds, in bytes.

    Attributes:
        parameters: of the weights.
        gradients: of their gradients.
        optimizer: of the optimizer's state on this rank (a share of it under ZeRO-1).
        activation_per_token: what autograd keeps of one token from its forward to its backward,
            K and V apart.
        kv_per_token: keys and values of one token, all layers of the stage.
    """

    parameters: float
    gradients: float
    optimizer: float
    activation_per_token: float
    kv_per_token: float

    @property
    def fixed(self) -> float:
        """What lives through the whole step."""
        return self.parameters + self.gradients + self.optimizer

    def peak(self, row: Sequence[Action], groups: Sequence[Group]) -> float:
        """The most bytes at any time of a step.

        Args:
            row: the stage's actions.
            groups: the groups of the step, one for each of the schedule's micro-batches.
        """
        released = released_by(row)
        held = peak = self.fixed
        with_gradients: set[int] = set()
        for kind, micro_batch, index in row:
            group = groups[micro_batch]
            activations = group.sequences * group.lengths[index] * self.activation_per_token
            context = group.sequences * group.seq_length * self.kv_per_token
            if kind == "F":
                held += activations + (context if index == 0 else 0.0)
            elif kind == "B" and len(group.lengths) > 1 and micro_batch not in with_gradients:
                # dK and dV of the context; a sequence that is not cut has none.
                with_gradients.add(micro_batch)
                held += context
            peak = max(peak, held)
            if kind == released:
                held -= activations
            if kind == "B" and index == 0:
                held -= context * (2 if micro_batch in with_gradients else 1)
        return peak


def optimizer_bytes(parameters: int, *, half: bool, replicas: int = 1) -> float:
    """What Adam keeps for so many parameters on one rank.

    Two fp32 moments; with 16-bit parameters also an fp32 copy of them and of their gradients, as
    DeepSpeed's BF16 and ZeRO-1 optimizers hold them.

    Args:
        parameters: trained on this rank.
        half: whether they have 16 bits.
        replicas: data-parallel ranks that share the state (ZeRO-1); 1 where each has its own.
    """
    return parameters * (16.0 if half else 8.0) / replicas


__all__ = ["GIB", "StageMemory", "optimizer_bytes"]
