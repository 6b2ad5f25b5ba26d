"""What crosses from one stage to the next, learnt once and then known for every slice.

The first time a stage sends to the next it describes its tensors: dtype, whether their gradient
comes back, and the shape with the sequence and token dimensions left open. After that, both sides
know the shape of every slice, so no transfer needs a handshake and receives can be posted ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from ..errors import ConfigError, TeraPipeError
from .adapter import ATTRIBUTE, Dims

# Codes of an encoded dimension: a fixed size, sequences, or tokens times a fraction.
_FIXED, _SEQUENCES, _TOKENS = 0, 1, 2
# What may cross; a dtype's place is its number in an encoded boundary.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
MESSAGE_SIZE = 256
"""int64 numbers of an encoded boundary."""


@dataclass(frozen=True)
class TensorTemplate:
    """One tensor that crosses: its shape for any slice.

    ``shape`` holds (code, numerator, denominator) for each dimension. Under sequence parallelism
    a rank holds a fraction of a slice's tokens.
    """

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[tuple[int, int, int], ...]

    def size(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """The shape for a slice of ``tokens`` tokens of ``sequences`` sequences."""
        return tuple(self._dimension(*dimension, sequences, tokens) for dimension in self.shape)

    @staticmethod
    def _dimension(code: int, numerator: int, denominator: int, sequences: int, tokens: int) -> int:
        if code == _FIXED:
            return numerator
        if code == _SEQUENCES:
            return sequences
        size, rest = divmod(tokens * numerator, denominator)
        if rest:
            raise ConfigError(
                f"slices: found a slice of {tokens} tokens, allowed are multiples of {denominator} "
                "here (sequence parallelism shares a slice between ranks); change terapipe.slices"
            )
        return size


@dataclass(frozen=True)
class Boundary:
    """The tensors that cross between two stages."""

    tensors: tuple[TensorTemplate, ...]
    _sizes: dict[tuple[int, int], list[tuple[int, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def sizes(self, sequences: int, tokens: int) -> list[tuple[int, ...]]:
        """The tensors' shapes for a slice; computed once for each kind of slice."""
        key = (sequences, tokens)
        if key not in self._sizes:
            self._sizes[key] = [template.size(sequences, tokens) for template in self.tensors]
        return self._sizes[key]

    @classmethod
    def of(
        cls, outputs: Sequence[Tensor], dims: Sequence[Dims], *, sequences: int, tokens: int
    ) -> Boundary:
        """Learns the boundary from the outputs of a slice.

        Raises:
            ConfigError: if the outputs do not fit what the adapter says of them.
        """
        if len(outputs) != len(dims):
            raise ConfigError(
                f"adapter: found {len(outputs)} tensors that cross to the next stage, allowed are "
                f"{len(dims)}; change the boundary of the model's {ATTRIBUTE}"
            )
        return cls(
            tuple(
                _template(tensor, dim, sequences=sequences, tokens=tokens)
                for tensor, dim in zip(outputs, dims, strict=True)
            )
        )

    def check(self, outputs: Sequence[Tensor], *, sequences: int, tokens: int) -> None:
        """Raises if a slice's outputs are not what was learnt from the first one.

        Raises:
            TeraPipeError: names the tensor and both shapes.
        """
        if len(outputs) != len(self.tensors):
            raise TeraPipeError(
                f"boundary: found {len(outputs)} tensors, allowed is {len(self.tensors)} as the "
                "first slice had; let the stage give as many for every slice"
            )
        sizes = self.sizes(sequences, tokens)
        for index, (tensor, template) in enumerate(zip(outputs, self.tensors, strict=True)):
            size = sizes[index]
            if tensor.shape != size or tensor.dtype != template.dtype:
                raise TeraPipeError(
                    f"boundary: found tensor {index} of shape {tuple(tensor.shape)} and "
                    f"{tensor.dtype}, allowed is {size} and {template.dtype} as the first slice "
                    f"had; change the boundary of the model's {ATTRIBUTE}"
                )
            if tensor.requires_grad != template.requires_grad:
                raise TeraPipeError(
                    f"boundary: found tensor {index} with requires_grad {tensor.requires_grad}, "
                    f"allowed is {template.requires_grad} as the first slice had; freeze layers "
                    "before the engine is built, not between steps"
                )

    def bytes(self, sequences: int, tokens: int) -> int:
        """What crosses for a slice, one way."""
        sizes = self.sizes(sequences, tokens)
        return sum(
            math.prod(size) * template.dtype.itemsize
            for size, template in zip(sizes, self.tensors, strict=True)
        )

    def gradients(self) -> Boundary:
        """The tensors that come back: the gradients of those that have one."""
        return Boundary(tuple(template for template in self.tensors if template.requires_grad))

    def encode(self) -> Tensor:
        """The boundary as an int64 tensor of ``MESSAGE_SIZE`` numbers, on the CPU."""
        numbers = [len(self.tensors)]
        for template in self.tensors:
            numbers += [_DTYPES.index(template.dtype), int(template.requires_grad)]
            numbers.append(len(template.shape))
            for dimension in template.shape:
                numbers += dimension
        if len(numbers) > MESSAGE_SIZE:
            raise ConfigError(
                f"boundary: found {len(self.tensors)} tensors between two stages, allowed is what "
                f"{MESSAGE_SIZE} numbers describe; let fewer tensors cross"
            )
        return torch.tensor(numbers + [0] * (MESSAGE_SIZE - len(numbers)), dtype=torch.int64)

    @classmethod
    def decode(cls, message: Tensor) -> Boundary:
        """Reads what :meth:`encode` wrote."""
        numbers = iter(message.tolist())
        templates = []
        for _ in range(next(numbers)):
            dtype = _DTYPES[next(numbers)]
            requires_grad = bool(next(numbers))
            shape = tuple(
                (next(numbers), next(numbers), next(numbers)) for _ in range(next(numbers))
            )
            templates.append(TensorTemplate(dtype, requires_grad, shape))
        return cls(tuple(templates))


def _template(tensor: Tensor, dim: Dims, *, sequences: int, tokens: int) -> TensorTemplate:
    if tensor.dtype not in _DTYPES:
        raise ConfigError(
            f"boundary: found {tensor.dtype} between two stages, allowed are "
            f"{', '.join(map(str, _DTYPES))}; convert it in the last layer"
        )
    shape = [(_FIXED, size, 1) for size in tensor.shape]
    if dim is not None:
        # Under sequence parallelism a rank holds fewer tokens than the slice has, never more.
        if (
            max(dim.batch, dim.sequence) >= tensor.dim()
            or tensor.shape[dim.batch] != sequences
            or not 1 <= tensor.shape[dim.sequence] <= tokens
        ):
            raise ConfigError(
                f"adapter: found a tensor of shape {tuple(tensor.shape)} that crosses to the next "
                f"stage, allowed are {sequences} sequences in dimension {dim.batch} and {tokens} "
                f"tokens in dimension {dim.sequence}; change the boundary of the model's "
                f"{ATTRIBUTE}"
            )
        shape[dim.batch] = (_SEQUENCES, 1, 1)
        fraction = Fraction(tensor.shape[dim.sequence], tokens)
        shape[dim.sequence] = (_TOKENS, fraction.numerator, fraction.denominator)
    return TensorTemplate(tensor.dtype, tensor.requires_grad, tuple(shape))
