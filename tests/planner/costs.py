"""Costs to plan with: tables of random times, and cost models with round numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.planner import CostModel, Fit, StageCost, StageMemory, Transfer

KINDS = ("uniform", "ties", "free", "wild", "overhead", "paper")
"""How random times are distributed, see :func:`random_time`."""


@dataclass(frozen=True)
class Table:
    """``values[sequences, length, context]`` in ms."""

    values: Any

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        return self.values[sequences, length, context]


def random_time(kind: str, rng: random.Random, length: int, context: int, sequences: int) -> float:
    if kind == "ties":
        return float(rng.randint(1, 3))
    if kind == "free":
        return float(rng.randint(0, 2))
    if kind == "wild":
        return float(np.exp(rng.gauss(0, 3)))
    if kind == "overhead":
        return 20.0 + sequences * length + rng.random()
    if kind == "paper":
        return 1.0 + sequences * (length + 0.1 * length * context) * (1 + 0.05 * rng.random())
    return rng.random()


def random_table(kind: str, seed: int, *, seq_length: int, sequences: int) -> Table:
    rng = random.Random(seed)
    values = np.zeros((sequences + 1, seq_length + 1, seq_length + 1))
    for b in range(1, sequences + 1):
        for length in range(1, seq_length + 1):
            for context in range(seq_length + 1 - length):
                values[b, length, context] = random_time(kind, rng, length, context, b)
    return Table(values)


@dataclass(frozen=True)
class Formula:
    """A function of length, context and sequences, all arrays."""

    ms: Callable[[Any, Any, Any], Any]

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        return self.ms(np.asarray(length, float), np.asarray(context, float), sequences)


def cuts(seq_length: int, granularity: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut a sequence on the grid, as lists of ``(length, context)``."""
    inner = range(granularity, seq_length, granularity)
    for chosen in range(2 ** len(inner)):
        ends = [end for bit, end in enumerate(inner) if chosen >> bit & 1] + [seq_length]
        yield [(end - start, start) for start, end in zip([0, *ends], ends, strict=False)]


def line(start: float, per_token: float, *, price: float = 0.0, form: str = "paper") -> Fit:
    """``start + per_token * tokens``, and ``price`` for each token that each sequence sees."""
    tokens = (0.0, 1024.0)
    base_ms = (start, start + 1024 * per_token)
    return Fit(form, tokens, base_ms, lengths=(0.0,), price_ms=(price,))


def stage(
    name: str = "stage 0", *, slow: float = 1.0, memory: StageMemory | None = None
) -> StageCost:
    """A forward of ``slow * (1 + tokens / 64)`` ms and a bit of context, a backward of twice."""
    return StageCost(
        name,
        forward=line(slow, slow / 64, price=slow / 4096),
        backward=line(2 * slow, slow / 32, price=slow / 2048),
        memory=memory,
    )


def model(*stages: StageCost, seq_length: int = 256, transfer: Transfer | None = None) -> CostModel:
    return CostModel(
        stages=stages or (stage(),),
        seq_length=seq_length,
        transfer=transfer or Transfer(),
        about={"device": "cpu", "layers": 4},
    )
