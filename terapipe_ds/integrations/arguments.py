"""A script's arguments, read as ``argparse`` would without knowing the script's options."""

from __future__ import annotations

from collections.abc import Sequence


def value_of(option: str, argv: Sequence[str]) -> str | None:
    """An option's value, the last one where it is given twice."""
    value = None
    for index, argument in enumerate(argv):
        if argument == option and index + 1 < len(argv):
            value = argv[index + 1]
        elif argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
    return value


def number_of(option: str, argv: Sequence[str]) -> int | None:
    """An option's value, where it is a number of at least 0."""
    value = value_of(option, argv)
    return int(value) if value is not None and value.isdecimal() else None


__all__ = ["number_of", "value_of"]
