"""SliceScheme: how a loaded micro-batch is cut into groups of sequences and token slices.

This is the paper's ``[(b, [l1, l2, ...]), ...]`` (TeraPipe, arXiv 2102.07988, section 3.4) as plain
data: ``b`` sequences of a micro-batch, cut along the tokens into slices of ``l1, l2, ...`` tokens.
All slice arithmetic of the project lives here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True)
class TokenRange:
    """Tokens ``[start, start + length)`` of a sequence of ``total`` tokens."""

    start: int
    length: int
    total: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        return self.stop == self.total

    @property
    def as_slice(self) -> slice:
        """For indexing along the tokens."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Group:
    """Some sequences of a micro-batch, and the lengths of their slices in tokens."""

    sequences: int
    lengths: tuple[int, ...]

    @property
    def seq_length(self) -> int:
        return sum(self.lengths)

    def ranges(self) -> list[TokenRange]:
        """The token range of every slice, first to last."""
        stops = accumulate(self.lengths)
        return [
            TokenRange(stop - length, length, self.seq_length)
            for stop, length in zip(stops, self.lengths, strict=True)
        ]


@dataclass(frozen=True, init=False, repr=False)
class SliceScheme:
    """The groups of one micro-batch.

    Args:
        groups: ``[(sequences, [lengths...]), ...]``; every number is a positive integer and all
            groups have the same sum of lengths, the sequence length.

    Raises:
        ConfigError: if a number is not a positive integer or the groups' lengths differ in sum.
    """

    groups: tuple[Group, ...]

    def __init__(self, groups: Sequence[Any]) -> None:
        if not isinstance(groups, list | tuple):
            raise ConfigError(
                f"slices: found {groups!r}, allowed is a list of groups (sequences, [lengths...])"
            )
        parsed = tuple(_parse_group(group) for group in groups)
        if not parsed:
            raise ConfigError(
                "slices: found an empty scheme, allowed is at least one group "
                "(sequences, [lengths...])"
            )
        sums = sorted({group.seq_length for group in parsed})
        if len(sums) > 1:
            raise ConfigError(
                f"slices: found groups whose lengths sum to {sums}, "
                "allowed is one sum for all groups, the sequence length"
            )
        object.__setattr__(self, "groups", parsed)

    @classmethod
    def even(cls, *, sequences: int, seq_length: int, count: int, unit: int = 1) -> SliceScheme:
        """One group of ``count`` slices of almost the same length, longer first.

        Args:
            sequences: of the group.
            seq_length: tokens of a sequence.
            count: of slices.
            unit: lengths are multiples of it and differ by at most one of it; what is left of the
                sequence goes to the last.
        """
        units, rest = divmod(seq_length, unit)
        if not 1 <= count <= max(1, units):
            of = "" if unit == 1 else f" of at least {unit} tokens"
            raise ConfigError(
                f"slices: found {count} slices{of} for a sequence of {seq_length} tokens, "
                f"allowed are 1 to {max(1, units)}"
            )
        length, longer = divmod(units, count)
        lengths = [unit * (length + (index < longer)) for index in range(count)]
        lengths[-1] += rest
        return cls([(sequences, lengths)])

    @classmethod
    def resolve(
        cls, slices: SlicesSetting, *, sequences: int, seq_length: int, multiple_of: int = 1
    ) -> SliceScheme:
        """The scheme of a loaded micro-batch of ``sequences`` sequences of ``seq_length`` tokens.

        Args:
            slices: as the block has it.
            sequences: of the micro-batch.
            seq_length: its tokens.
            multiple_of: what slice lengths have to be multiples of.

        Raises:
            ConfigError: if the setting does not cover exactly this micro-batch.
        """
        scheme = cls._resolve(slices, sequences, seq_length, multiple_of)
        for group in scheme.groups:
            for length in group.lengths:
                if length % multiple_of:
                    raise ConfigError(
                        f"slices: found a slice of {length} tokens, allowed are multiples of "
                        f"{multiple_of} here (sequence parallelism shares a slice between ranks); "
                        "change terapipe.slices or the sequence length"
                    )
        return scheme

    @classmethod
    def _resolve(
        cls, slices: SlicesSetting, sequences: int, seq_length: int, multiple_of: int
    ) -> SliceScheme:
        if isinstance(slices, int):
            return cls.even(
                sequences=sequences, seq_length=seq_length, count=slices, unit=multiple_of
            )
        scheme = slices if isinstance(slices, SliceScheme) else cls([(sequences, [*slices])])
        if scheme.seq_length != seq_length:
            raise ConfigError(
                f"slices: found lengths that sum to {scheme.seq_length}, but the micro-batch has "
                f"{seq_length} tokens a sequence; change terapipe.slices (a count fits every "
                "length) or the sequence length"
            )
        if scheme.sequences != sequences:
            raise ConfigError(
                f"slices: found groups that cover {scheme.sequences} sequences, but the "
                f"micro-batch has {sequences}; change terapipe.slices or "
                "train_micro_batch_size_per_gpu"
            )
        return scheme

    @classmethod
    def from_text(cls, text: str) -> SliceScheme:
        """Reads the paper's notation, for example ``"[(1, [776, 640, 632])] * 16"``.

        Lists may be joined with ``+`` and repeated with ``* n``; nothing is evaluated.
        """
        try:
            groups = _read(ast.parse(text.strip(), mode="eval").body)
            if not isinstance(groups, list):
                raise _NotScheme
            return cls(groups)
        except (SyntaxError, _NotScheme):
            raise ConfigError(
                f"slices: found the text {text!r}, allowed is the form "
                "'[(1, [776, 640, 632])] * 16', joined with +"
            ) from None

    @classmethod
    def from_json(cls, text: str) -> SliceScheme:
        """Reads what :meth:`to_json` wrote: ``[[sequences, [lengths...]], ...]``."""
        try:
            return cls(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"slices: found text that is not JSON ({error})") from None

    def to_json(self) -> str:
        return json.dumps([[group.sequences, list(group.lengths)] for group in self.groups])

    @property
    def sequences(self) -> int:
        """Sequences of the micro-batch."""
        return sum(group.sequences for group in self.groups)

    @property
    def seq_length(self) -> int:
        """Tokens of every sequence."""
        return self.groups[0].seq_length

    @property
    def slices(self) -> list[int]:
        """The number of slices of every group."""
        return [len(group.lengths) for group in self.groups]

    def rows(self) -> list[slice]:
        """The sequences of every group, as a range of the micro-batch's rows."""
        stops = accumulate(group.sequences for group in self.groups)
        return [
            slice(stop - group.sequences, stop)
            for stop, group in zip(stops, self.groups, strict=True)
        ]

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return ((group.sequences, list(group.lengths)) for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        """The paper's notation; :meth:`from_text` reads it back."""
        parts = []
        for group, run in groupby(self.groups):
            text = f"[({group.sequences}, {list(group.lengths)})]"
            repeats = len(list(run))
            parts.append(text if repeats == 1 else f"{text} * {repeats}")
        return " + ".join(parts)

    def __repr__(self) -> str:
        return f"SliceScheme({self})"


SlicesSetting = int | tuple[int, ...] | SliceScheme
"""What the "slices" key may hold besides "auto": a number of slices, their lengths, or a scheme."""


_MOST_REPEATS = 1_000_000


class _NotScheme(Exception):
    pass


def _read(node: ast.expr) -> Any:
    """The value of a literal built from integers, lists, tuples, ``+`` and ``*`` alone."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_read(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _read(node.left), _read(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if right > _MOST_REPEATS:
                raise _NotScheme
            return left * right
    raise _NotScheme


def _parse_group(group: Any) -> Group:
    if isinstance(group, Group):
        group = (group.sequences, group.lengths)
    if not isinstance(group, list | tuple) or len(group) != 2:
        raise ConfigError(
            f"slices: found the group {group!r}, allowed is (sequences, [lengths...])"
        )
    sequences, lengths = group
    return Group(_positive(sequences, group), parse_lengths(lengths))


def parse_lengths(lengths: Any) -> tuple[int, ...]:
    """Slice lengths in tokens.

    Raises:
        ConfigError: if they are not a list of at least one positive integer.
    """
    if not isinstance(lengths, list | tuple) or not lengths:
        raise ConfigError(f"slices: found {lengths!r}, allowed is a list of slice lengths")
    return tuple(_positive(length, lengths) for length in lengths)


def _positive(number: Any, where: Any) -> int:
    if type(number) is not int or number < 1:
        raise ConfigError(
            f"slices: found {number!r} in {where!r}, allowed are integers of at least 1"
        )
    return number
