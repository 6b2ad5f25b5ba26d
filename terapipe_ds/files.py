"""Files that are written whole or not at all, and where measured costs are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "TERAPIPE_CACHE"


def cache_folder() -> Path:
    """Where measured costs are kept; it need not be there yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "terapipe_ds"


@contextmanager
def temporary_for(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to write to, which is renamed at the end if nothing fails."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if path.is_file():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file through a temporary one beside it; line ends stay as they are."""
    with temporary_for(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
