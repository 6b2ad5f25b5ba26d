"""What slices cost: the fitted model of measured stages, and its file ``cost.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..files import write_text
from .memory import StageMemory

Floats = NDArray[np.float64]

SCHEMA = "terapipe-cost"
VERSION = 1

# Of a backward the weight gradients, where nobody has measured: of a linear layer's two products.
_WEIGHT_SHARE = 0.5

# A clock's tick may hide a very short time.
_TINY_MS = 1e-6

KINDS = ("first", "middle", "last")
"""Names of stages where a file holds one of each kind instead of every stage."""


class Sample(NamedTuple):
    """One measured slice: medians over repeats.

    Attributes:
        length: tokens of the slice.
        context: tokens before it.
        sequences: sequences that went together.
        forward_ms: its forward.
        backward_ms: its backward, weight gradients included.
        held_out: whether the fit has not seen it.
        weight_ms: of the backward the weight gradients, where they were put off; 0 otherwise.
    """

    length: int
    context: int
    sequences: int
    forward_ms: float
    backward_ms: float
    held_out: bool = False
    weight_ms: float = 0.0


@dataclass(frozen=True)
class Fit:
    """The time of one direction of one stage.

    ``t(l, c, b) = g(b l) + 1[c > 0] (a0 + a1 b l) + b p(l) (c + s l)``: a base ``g``, what having
    a context adds, and the price ``p`` of a context token, both piecewise linear. With
    ``p(l) = a2 + a3 l``, ``s = 0`` and one sequence this is the paper's model (section 3.3: a
    measured base, and ``a0 + a1 l + a2 c + a3 l c`` for the context). ``s = 1/2`` takes a slice's
    attention to its own tokens out of the base: each sees half of them on average.

    Attributes:
        form: how it was fitted, see ``fit.py``.
        tokens: ``b l`` at the corners of ``g``.
        base_ms: ``g`` there.
        jump: ``a0`` and ``a1``.
        lengths: ``l`` at the corners of ``p``.
        price_ms: ``p`` there, in ms a context token of one sequence.
        own_share: ``s``.
        least_ms: times are at least this.
    """

    form: str
    tokens: tuple[float, ...]
    base_ms: tuple[float, ...]
    jump: tuple[float, float] = (0.0, 0.0)
    lengths: tuple[float, ...] = (0.0,)
    price_ms: tuple[float, ...] = (0.0,)
    own_share: float = 0.0
    least_ms: float = 0.0

    def __post_init__(self) -> None:
        if len(self.jump) != 2:
            raise ConfigError(f"cost: found a jump of {len(self.jump)} numbers, allowed are 2")
        for what, corners, values in (
            ("token counts", self.tokens, self.base_ms),
            ("lengths", self.lengths, self.price_ms),
        ):
            rising = all(a < b for a, b in pairwise(corners))
            if not corners or len(corners) != len(values) or not rising:
                raise ConfigError(
                    f"cost: found a fit with {len(corners)} {what} and {len(values)} times, "
                    f"allowed are as many of both, the {what} rising"
                )

    def __call__(self, length: Any, context: Any, sequences: Any = 1) -> Floats:
        """ms; scalars or arrays, broadcast."""
        length, context, sequences = (
            np.asarray(value, dtype=np.float64) for value in (length, context, sequences)
        )
        tokens = sequences * length
        a0, a1 = self.jump
        price = interpolate(length, self.lengths, self.price_ms)
        time: Floats = interpolate(tokens, self.tokens, self.base_ms)
        time = time + np.where(context > 0, a0 + a1 * tokens, 0.0)
        time = time + sequences * price * (context + self.own_share * length)
        bounded: Floats = np.maximum(time, self.least_ms)
        return bounded


def interpolate(
    x: Floats, corners: Sequence[float] | Floats, values: Sequence[float] | Floats
) -> Floats:
    """Piecewise linear, going on beyond the last corner as before it, flat before the first."""
    inside: Floats = np.interp(x, corners, values)
    if len(corners) < 2:
        return inside
    slope = (values[-1] - values[-2]) / (corners[-1] - corners[-2])
    return inside + np.maximum(x - corners[-1], 0.0) * slope


@dataclass(frozen=True)
class StageCost:
    """One measured stage.

    Attributes:
        name: ``stage 0``, ``stage 1``, ... or ``first``, ``middle``, ``last``.
        forward: its forward's time.
        backward: its backward's time, weight gradients included.
        error: median relative error of forward and backward together on samples that the fit has
            not seen; None where there are none.
        errors: the same for every form of fit that was tried.
        samples: what was measured.
        memory: what its ranks hold, where it was measured.
        weight: of the backward the weight gradients, where they were measured apart.
    """

    name: str
    forward: Fit
    backward: Fit
    error: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    memory: StageMemory | None = None
    weight: Fit | None = None

    def weight_share(self, length: Any, context: Any, sequences: Any = 1) -> Floats:
        """Of a backward the ms of weight gradients; half of it where that was not measured."""
        backward = self.backward(length, context, sequences)
        if self.weight is None:
            return backward * _WEIGHT_SHARE
        weight: Floats = np.minimum(self.weight(length, context, sequences), backward)
        return weight

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Floats:
        """Forward and backward, in ms."""
        return self.forward(length, context, sequences) + self.backward(length, context, sequences)


@dataclass(frozen=True)
class Transfer:
    """The time of a message between two stages: ``latency_ms + bytes * ms_per_byte``.

    Attributes:
        latency_ms: of a message without content.
        ms_per_byte: the inverse of the bandwidth.
        bytes_per_token: what crosses for one token of one sequence, one way.
        samples: measured ``(bytes, ms)``.
    """

    latency_ms: float = 0.0
    ms_per_byte: float = 0.0
    bytes_per_token: float = 0.0
    samples: tuple[tuple[float, float], ...] = ()

    @classmethod
    def fitted(
        cls, links: Sequence[Sequence[tuple[float, float]]], *, bytes_per_token: float
    ) -> Transfer:
        """From measured ``(bytes, ms)``, the same sizes on every link; the median over links."""
        columns = list(zip(*links, strict=True))
        if not columns:
            return cls(bytes_per_token=bytes_per_token)
        samples = [(column[0][0], float(np.median([ms for _, ms in column]))) for column in columns]
        size, ms = np.array(samples, dtype=np.float64).T
        ms = np.maximum(ms, _TINY_MS)
        matrix = np.stack([np.ones_like(size), size], axis=1) / ms[:, None]
        latency, per_byte = np.linalg.lstsq(matrix, np.ones_like(ms), rcond=None)[0]
        if len(ms) < 2 or latency < 0:
            latency, per_byte = 0.0, np.median(ms / size)
        elif per_byte < 0:
            latency, per_byte = np.median(ms), 0.0
        return cls(
            latency_ms=float(latency),
            ms_per_byte=float(per_byte),
            bytes_per_token=bytes_per_token,
            samples=tuple(samples),
        )

    def occupied_ms(self, tokens: float) -> float:
        """How long a message of so many tokens occupies its channel."""
        return tokens * self.bytes_per_token * self.ms_per_byte


@dataclass(frozen=True)
class CostModel:
    """What slices cost on the stages of a pipeline.

    Attributes:
        stages: every stage, or one of each kind (:data:`KINDS`), or one that stands for all.
        seq_length: the longest sequence that was measured, in tokens.
        transfer: messages between stages.
        about: what was measured: device, versions, layer shape, dtype, tensor-parallel size.
    """

    stages: tuple[StageCost, ...]
    seq_length: int
    transfer: Transfer = Transfer()
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("cost: found no stages, allowed is at least one; profile again")

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        """Forward and backward of a slice on the slowest stage, in ms.

        Args:
            length: tokens of the slice.
            context: tokens before it.
            sequences: sequences that go together.
        """
        times = [stage.time(length, context, sequences) for stage in self.stages]
        slowest = np.maximum.reduce(times)
        return slowest if slowest.ndim else float(slowest)

    def stage(self, stage: int, stages: int) -> StageCost:
        """The costs of one stage of a pipeline.

        Raises:
            ConfigError: if the file holds other stages than the pipeline has.
        """
        if len(self.stages) == 1:
            return self.stages[0]
        if tuple(each.name for each in self.stages) == KINDS and stages > 1:
            return self.stages[0 if stage == 0 else 2 if stage == stages - 1 else 1]
        if len(self.stages) != stages:
            raise ConfigError(
                f"cost: found costs of {len(self.stages)} stages for a pipeline of {stages}, "
                "allowed are as many; change --stages, or profile that pipeline"
            )
        return self.stages[stage]

    def save(self, path: str | Path) -> None:
        """Writes the file, whole or not at all."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "about": dict(self.about),
            "seq_length": self.seq_length,
            "transfer": dataclasses.asdict(self.transfer),
            "stages": [_stage_to_dict(stage) for stage in self.stages],
        }

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Reads the file.

        Raises:
            ConfigError: if it cannot be read, or is no cost file of this version.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cost: found {path}, which cannot be read ({error}), allowed is a file written by "
                "'terapipe profile'"
            ) from None
        return cls.from_dict(content, where=str(path))

    @classmethod
    def from_dict(cls, content: Any, *, where: str = "a cost model") -> CostModel:
        """Reads what :meth:`to_dict` gives; raises as :meth:`load`."""
        found = (content.get("schema"), content.get("version")) if isinstance(content, dict) else ()
        if found != (SCHEMA, VERSION):
            raise ConfigError(
                f"cost: found schema {found} in {where}, allowed is {(SCHEMA, VERSION)}; "
                "write the file again with 'terapipe profile'"
            )
        try:
            transfer = dict(content["transfer"])
            samples = tuple((float(n), float(ms)) for n, ms in transfer.pop("samples"))
            transfer = {name: float(value) for name, value in transfer.items()}
            return cls(
                stages=tuple(_stage_from_dict(stage) for stage in content["stages"]),
                seq_length=int(content["seq_length"]),
                transfer=Transfer(**transfer, samples=samples),
                about=dict(content["about"]),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cost: found {where} with a part that is missing or wrong ({error!r}), allowed is "
                "a file written by 'terapipe profile'"
            ) from None

    def check_covers(self, seq_length: int) -> None:
        """Raises if a plan would rest on lengths that were never measured.

        Raises:
            ConfigError: if ``seq_length`` is longer than what was measured.
        """
        if seq_length > self.seq_length:
            raise ConfigError(
                f"cost: found measurements up to {self.seq_length} tokens for sequences of "
                f"{seq_length}, allowed are sequences up to what was measured; change --seq-length "
                "or profile longer sequences"
            )


def _stage_to_dict(stage: StageCost) -> dict[str, Any]:
    content = dataclasses.asdict(stage)
    content["samples"] = [list(sample) for sample in stage.samples]
    return content


def _stage_from_dict(content: Mapping[str, Any]) -> StageCost:
    memory, weight = content["memory"], content["weight"]
    return StageCost(
        name=str(content["name"]),
        forward=_fit_from_dict(content["forward"]),
        backward=_fit_from_dict(content["backward"]),
        error=content["error"],
        errors=dict(content["errors"]),
        samples=tuple(Sample(*sample) for sample in content["samples"]),
        memory=None
        if memory is None
        else StageMemory(**{name: float(value) for name, value in memory.items()}),
        weight=None if weight is None else _fit_from_dict(weight),
    )


def _fit_from_dict(content: Mapping[str, Any]) -> Fit:
    values = dict(content)
    for name in ("tokens", "base_ms", "jump", "lengths", "price_ms"):
        values[name] = tuple(float(value) for value in values[name])
    for name in ("own_share", "least_ms"):
        values[name] = float(values[name])
    return Fit(**values)


__all__ = ["KINDS", "CostModel", "Fit", "Sample", "StageCost", "Transfer"]
