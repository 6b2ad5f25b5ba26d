"""Other people's training scripts, run sliced without an edit.

Each integration is a module here with ``install(argv: list[str]) -> bool``. It is called before the
script starts, gets the script's arguments, may take options of its own out of them, prepares this
process, and says whether it applies. ``applies(argv: list[str]) -> bool`` says so and does nothing
else. It must not import torch, DeepSpeed or megatron: a script may
set what these read when they are imported (``after_import.py`` waits for that).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ..config import switched_off
from .megatron_core import take_option

_INTEGRATIONS = ("deepspeed_script", "megatron_core")


def install(argv: list[str] | None = None) -> list[str]:
    """Prepares this process for a script, by every integration that applies to it.

    ``terapipe_ds.run`` calls it; a script that is started without can do so in its first line.

    Args:
        argv: the script's arguments, without its name; this process's own if None. Integrations
            take their own options out of it.

    Returns:
        The names of the integrations that apply; none with ``TERAPIPE=0`` in the environment.

    Raises:
        ConfigError: for a wrong setting.
    """
    arguments = sys.argv[1:] if argv is None else argv
    found: list[str] = []
    if switched_off():
        # The script does not know it, and it may stay where it is for a run.
        take_option(arguments)
    else:
        found = [
            name for name in _INTEGRATIONS if import_module(f".{name}", __name__).install(arguments)
        ]
    if argv is None:
        sys.argv[1:] = arguments
    return found


def applying(argv: Sequence[str]) -> list[str]:
    """The integrations that :func:`install` would prepare this process by, if not switched off.

    Nothing is prepared.

    Args:
        argv: the script's arguments, without its name.

    Returns:
        Their names.

    Raises:
        ConfigError: for a wrong setting.
    """
    return [
        name for name in _INTEGRATIONS if import_module(f".{name}", __name__).applies(list(argv))
    ]


__all__ = ["applying", "install"]
