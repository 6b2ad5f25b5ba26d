"""Where and with what a benchmark ran, and the form of its JSON file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 2**30
PACKAGES = ("torch", "deepspeed", "megatron-core")
# What a result does not depend on.
_NOT_RECORDED = ("--json", "--out", "--local_rank")


def write_results(path: Path, results: Any) -> None:
    """Writes a benchmark's results with everything that they were measured on and with.

    Args:
        path: the JSON file, with the keys ``command``, ``machine``, ``versions``, ``date`` and
            ``results``.
        results: anything that JSON takes.
    """
    from terapipe_ds.files import write_text

    content = {
        "command": command(sys.argv),
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "results": results,
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def command(argv: Sequence[str]) -> str:
    """The command to repeat a benchmark with, without where its output goes."""
    script, *arguments = argv
    return " ".join(["python", f"benchmarks/{Path(script).name}", *_recorded(arguments)])


def _recorded(arguments: Iterable[str]) -> Iterable[str]:
    left = iter(arguments)
    for argument in left:
        name, equals, _ = argument.partition("=")
        if name not in _NOT_RECORDED:
            yield argument
        elif not equals:
            next(left, None)


def machine() -> dict[str, Any]:
    """The processor, its cores, and GiB of memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / GIB, 1),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def versions() -> dict[str, str]:
    """Of Python, of the libraries, and of this project."""
    from terapipe_ds import __version__

    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "terapipe-ds": __version__,
    }
