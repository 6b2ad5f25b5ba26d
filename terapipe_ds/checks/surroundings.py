"""Environment variables, folders and programs that training would meet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import SWITCH, switched_off
from ..errors import ConfigError
from ..files import CACHE_VARIABLE
from ..runtime.refuse_settings import queue_refusal
from .findings import Finding, note, ok, refused

# Compiling DeepSpeed's helper takes a minute or two.
_ABANDONED_S = 300.0


def check_switch() -> list[Finding]:
    """Whether the environment switches slicing off."""
    try:
        off = switched_off()
    except ConfigError as error:
        return [refused("environment", str(error))]
    if off:
        return [refused("environment", f"{SWITCH}: found 0 (off), allowed is 1; unset it")]
    return []


def check_queues(backend: str, environ: Mapping[str, str]) -> list[Finding]:
    """Whether the environment leaves the device more than one queue, which NCCL needs."""
    refusal = queue_refusal(backend, environ)
    return [] if refusal is None else [refused("environment", refusal)]


def check_cache(folder: Path) -> list[Finding]:
    """Whether measured costs could be kept in a folder, which need not be there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return [ok("cache", f"measured costs are kept in {folder}")]
    return [
        note(
            "cache",
            f"costs cannot be kept in {folder}, so they are measured at every start; set "
            f"{CACHE_VARIABLE} to a folder that can be written",
        )
    ]


def extensions_folder(environ: Mapping[str, str]) -> Path:
    """Where torch builds extensions, as ``torch.utils.cpp_extension`` looks for it."""
    chosen = environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    caches = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "torch_extensions"


def check_locks(folder: Path, *, now: float) -> list[Finding]:
    """Locks that a killed build has left, on which every later rank waits without end.

    Args:
        folder: of torch's extensions; in the default one there is one more for each kind of torch.
        now: seconds since the epoch.
    """
    found = []
    for lock in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        minutes = (now - lock.stat().st_mtime) / 60
        if 60 * minutes > _ABANDONED_S:
            found.append(
                refused(
                    "extensions",
                    f"lock: found {lock}, {minutes:.0f} minutes old, left by a build that was "
                    f"killed, on which every rank waits; delete {lock}",
                )
            )
        else:
            found.append(
                note("extensions", f"{lock} is there: wait until what is built now is done")
            )
    return found or [ok("extensions", f"no abandoned lock in {folder}")]


def programs(name: str, path: str) -> list[Path]:
    """The different programs of a name on a search path, the one that runs first."""
    found: dict[Path, Path] = {}
    for folder in path.split(os.pathsep):
        program = Path(folder or ".") / name
        if program.is_file() and os.access(program, os.X_OK):
            found.setdefault(program.resolve(), program)
    return list(found.values())


def check_ninja(found: Sequence[Path]) -> list[Finding]:
    """Whether ranks might find different ones; ``found`` is as of :func:`programs`."""
    if len(found) < 2:
        return []
    return [
        note(
            "extensions",
            f"{len(found)} ninja programs on PATH ({', '.join(map(str, found))}): ranks that find "
            "another one compile DeepSpeed's helpers again; keep one PATH for all",
        )
    ]


__all__ = [
    "check_cache",
    "check_locks",
    "check_ninja",
    "check_queues",
    "check_switch",
    "extensions_folder",
    "programs",
]
