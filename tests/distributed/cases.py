"""Settings in which sliced training is compared with the unsliced single-process run."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields
from typing import Any

SEQ_LENGTH = 48
VOCAB = 64
LAYERS = 4
HIDDEN = 32
SEQUENCES = 2

UNEVEN = {
    "three": [7, 30, 11],
    "five": [20, 3, 9, 15, 1],
    "groups": [[1, [17, 31]], [1, [5, 25, 18]]],
}
CHOICES: dict[str, list[Any]] = {
    "micro_batches": [1, 3],
    "schedule": ["1f1b", "gpipe", "zb-h1"],
    "warmup": [0, 2],
    "positions": ["learned_absolute", "rope"],
    "grouped_queries": [False, True],
    "tied_head": [True, False],
    "dtype": ["float64", "float32"],
    "style": ["gpt2", "llama"],
    "slices": list(UNEVEN),
    "optimizer": ["sgd", "adamw"],
    "whole_sequence": [False, True],
}


@dataclass(frozen=True)
class Case:
    """One setting; the fields are the keys of ``CHOICES``, and the number of stages."""

    stages: int
    micro_batches: int
    schedule: str
    warmup: int
    positions: str
    grouped_queries: bool
    tied_head: bool
    dtype: str
    style: str
    slices: str
    optimizer: str
    whole_sequence: bool

    @property
    def name(self) -> str:
        return "-".join(f"{key}={value}" for key, value in asdict(self).items())

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == "float64" else 1e-5


def possible(values: dict[str, Any]) -> bool:
    """A whole-sequence loss needs one group in a micro-batch; gpipe has no slack."""
    if values.get("schedule") == "gpipe" and values.get("warmup"):
        return False
    return not (values.get("whole_sequence") and values.get("slices") == "groups")


def pairs(values: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """All pairs of settings in a case."""
    return set(itertools.combinations(sorted(values.items()), 2))


def all_pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """All pairs of settings that are possible."""
    every = itertools.combinations(sorted(CHOICES), 2)
    return {
        ((a, x), (b, y))
        for a, b in every
        for x in CHOICES[a]
        for y in CHOICES[b]
        if possible({a: x, b: y})
    }


def covering_cases(stages: int) -> list[Case]:
    """Few cases in which every pair of settings occurs, chosen greedily."""
    candidates = [
        values
        for combination in itertools.product(*CHOICES.values())
        if possible(values := dict(zip(CHOICES, combination, strict=True)))
    ]
    missing = all_pairs()
    cases = []
    while missing:
        best = max(candidates, key=lambda values: len(pairs(values) & missing))
        missing -= pairs(best)
        cases.append(Case(stages=stages, **best))
    return cases


def settings_of(case: Case) -> dict[str, Any]:
    """The case's settings without the number of stages."""
    return {f.name: getattr(case, f.name) for f in fields(case) if f.name != "stages"}
