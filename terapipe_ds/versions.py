"""The releases of other packages that the whole test suite has passed with, stated once.

Others may work: an engine is built all the same, after a warning. Private names that have moved are
refused by ``runtime/deepspeed_seams.py``, whatever the version.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """The oldest and the newest release that were tested."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        return self.newest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


TESTED = {
    "torch": Range("2.9.1", "2.15.0"),
    "deepspeed": Range("0.19.4", "0.19.8"),
    "megatron-core": Range("0.15.3", "0.16.1"),
}

MODULES = {"torch": "torch", "deepspeed": "deepspeed", "megatron-core": "megatron.core"}
"""What is imported of each."""

OLDEST_PYTHON = "3.10"
TESTED_PYTHON = Range("3.11", "3.11")


def outside(version: str, tested: Range) -> bool:
    """Whether a version lies outside of a range; what it says after its numbers is not compared."""
    oldest, newest = numbers(tested.oldest), numbers(tested.newest)
    return not oldest <= numbers(version)[: len(newest)] <= newest


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with: ``2.13.0+cpu`` is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def in_use() -> dict[str, str]:
    """The version of each package that this process has imported.

    Megatron-DeepSpeed has a ``megatron.core`` of its own, which tells none and is not meant.
    """
    imported = {
        name: sys.modules[module] for name, module in MODULES.items() if module in sys.modules
    }
    return {
        name: str(module.__version__)
        for name, module in imported.items()
        if hasattr(module, "__version__")
    }


def warn(rank: int) -> None:
    """Warns of untested versions in use, on rank 0; Python shows it once."""
    message = warning(in_use())
    if message is not None and rank == 0:
        warnings.warn(message, stacklevel=3)


def warning(found: Mapping[str, str]) -> str | None:
    """What to warn of before an engine is built.

    Args:
        found: the version in use of each package, by its name in ``TESTED``.

    Returns:
        One line, or None if all versions are tested ones.
    """
    untested = [name for name, version in found.items() if outside(version, TESTED[name])]
    if not untested:
        return None
    return (
        "versions: found "
        + ", ".join(f"{name} {found[name]}" for name in untested)
        + ", tested are "
        + ", ".join(f"{name} {TESTED[name]}" for name in untested)
        + "; losses may differ from unsliced training: compare a few steps with TERAPIPE=0, or "
        "install a tested version"
    )


__all__ = [
    "MODULES",
    "OLDEST_PYTHON",
    "TESTED",
    "TESTED_PYTHON",
    "Range",
    "in_use",
    "numbers",
    "outside",
    "warn",
    "warning",
]
