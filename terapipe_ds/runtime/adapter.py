"""What the engine must know of a model in order to cut it along the tokens.

A ``PipelineModule`` carries its adapter in the attribute ``token_slice_adapter``;
``models/gpt.py`` sets one. Any other module can bring its own; one without is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

ATTRIBUTE = "token_slice_adapter"


@dataclass(frozen=True)
class TensorDims:
    """Which dimension of a tensor counts sequences, and which counts tokens."""

    batch: int
    sequence: int

    def cut(self, tensor: Tensor, rows: slice, tokens: slice) -> Tensor:
        """A view of some sequences' tokens."""
        tensor = tensor.narrow(self.batch, rows.start, rows.stop - rows.start)
        return tensor.narrow(self.sequence, tokens.start, tokens.stop - tokens.start)

    def tile(self, tensor: Tensor, sequences: int, tokens: int) -> Tensor:
        """A copy of a given size, with the tensor's entries over and over."""
        for dim, size in ((self.batch, sequences), (self.sequence, tokens)):
            index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
            tensor = tensor.index_select(dim, index)
        return tensor


Dims = TensorDims | None
"""None marks a tensor that every slice gets whole, such as a constant table."""

Tensors = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class SequenceAdapter:
    """Where sequences and tokens are in a model's tensors, and how its loss adds up.

    Attributes:
        inputs: for each tensor that the data iterator yields to the first stage.
        labels: for each tensor that it yields to the last stage.
        boundary: for each tensor that crosses from one stage to the next.
        output: the last stage's output.
        mean_over_valid_tokens: whether ``loss_fn(outputs, labels)`` is a mean over the valid tokens
            of what it is given; only then may it be computed slice by slice.
        token_weights: from the labels, a tensor ``[sequences, tokens]`` of each token's weight in
            that mean (a loss mask), or None where all count alike.
        check: raises :class:`ConfigError` if this stage's layers cannot be sliced.
        multiple_of: what slice lengths have to be multiples of; the tensor-parallel size under
            sequence parallelism.
        split_backward: changes the layers of a stage so that they put their weights' gradients off,
            for schedules that split the backward; plain ``torch.nn.Linear`` layers do if None.
        keep_random_state: a context manager that puts random states back, other than torch's own,
            and whatever else a forward changes besides buffers, where the model has any.
        balances_micro_batch: whether a term of the loss compares all sequences of a micro-batch, so
            that they cannot be cut into groups.
        scale_auxiliary_losses: takes what a loss is multiplied with before its backward, where
            layers add terms to the loss that the engine does not see.
    """

    inputs: Sequence[Dims]
    labels: Sequence[Dims]
    boundary: Sequence[Dims]
    output: TensorDims
    mean_over_valid_tokens: bool = False
    token_weights: Callable[[Any], Tensor | None] | None = None
    check: Callable[[torch.nn.Module], None] | None = None
    multiple_of: int = 1
    split_backward: Callable[[torch.nn.Module], None] | None = None
    keep_random_state: Callable[[], AbstractContextManager[None]] | None = None
    balances_micro_batch: bool = False
    scale_auxiliary_losses: Callable[[Tensor], None] | None = None

    def batch_shape(self, tensors: Tensors, dims: Sequence[Dims]) -> tuple[int, int]:
        """(sequences, tokens) of a loaded micro-batch's inputs or labels.

        Raises:
            ConfigError: if the tensors disagree or are not as many as the adapter says.
        """
        listed = as_tuple(tensors)
        if len(listed) != len(dims):
            raise ConfigError(
                f"adapter: found {len(listed)} tensors in a micro-batch, allowed are "
                f"{len(dims)}; change the data iterator or the model's {ATTRIBUTE}"
            )
        shapes = {
            (tensor.shape[dim.batch], tensor.shape[dim.sequence])
            for tensor, dim in zip(listed, dims, strict=True)
            if dim is not None
        }
        if len(shapes) != 1:
            raise ConfigError(
                f"adapter: found micro-batch tensors of (sequences, tokens) {sorted(shapes)}, "
                f"allowed is one shape; change the data iterator or the model's {ATTRIBUTE}"
            )
        return shapes.pop()

    def cut(self, tensors: Tensors, dims: Sequence[Dims], rows: slice, tokens: slice) -> Tensors:
        """The part of inputs or labels that belongs to one slice, in the same structure.

        Contiguous, as loaded tensors are: a model's loss may ``view`` its labels.
        """
        parts = tuple(
            tensor if dim is None else dim.cut(tensor, rows, tokens).contiguous()
            for tensor, dim in zip(as_tuple(tensors), dims, strict=True)
        )
        return parts if isinstance(tensors, tuple) else parts[0]

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """A group's outputs from those of its slices."""
        return slices[0] if len(slices) == 1 else torch.cat(list(slices), dim=self.output.sequence)

    def join_groups(self, groups: Sequence[Tensor]) -> Tensor:
        """A micro-batch's outputs from those of its groups."""
        return groups[0] if len(groups) == 1 else torch.cat(list(groups), dim=self.output.batch)


def adapter_of(module: torch.nn.Module) -> SequenceAdapter:
    """The module's adapter.

    Raises:
        ConfigError: if it has none.
    """
    adapter = getattr(module, ATTRIBUTE, None)
    if not isinstance(adapter, SequenceAdapter):
        raise ConfigError(
            f"model: found {type(module).__name__} without an adapter, allowed is a PipelineModule "
            f"whose {ATTRIBUTE} is a terapipe_ds.SequenceAdapter (gpt_pipeline sets one); set it, "
            'or "terapipe": {"enabled": false}'
        )
    return adapter


def cloned(tensors: Tensors) -> Tensors:
    """Copies, in the same structure, with a graph to the originals."""
    if isinstance(tensors, tuple):
        return tuple(tensor.clone() for tensor in tensors)
    return tensors.clone()


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """One tensor or several, as a tuple."""
    return tensors if isinstance(tensors, tuple) else (tensors,)
