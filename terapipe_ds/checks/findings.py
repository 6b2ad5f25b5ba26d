"""A finding: one line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "refused"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at, in a word or two.
        status: ``"refused"`` where training would not start, would hang, or would not be sliced;
            ``"note"`` for what to know; ``"ok"``.
        text: one line; of what is refused: what was found, what is allowed, what to change.
    """

    check: str
    status: Status
    text: str


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str) -> Finding:
    return Finding(check, "note", text)


def refused(check: str, text: str) -> Finding:
    return Finding(check, "refused", text)


def one_line(error: BaseException) -> str:
    """An exception as one line, with its type: some have no text."""
    return " ".join(f"{type(error).__name__}: {error}".split())


__all__ = ["Finding", "Status", "note", "ok", "one_line", "refused"]
