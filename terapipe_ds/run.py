"""Runs a training script, unedited, with token slices.

    deepspeed --module terapipe_ds.run pretrain_gpt.py --deepspeed_config ds.json ...

The script runs as if it had been started directly. What its ``"terapipe"`` block asks for is put in
place by ``terapipe_ds.integrations``, right after the script has imported what that builds on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from .errors import TeraPipeError
from .integrations import install

_USAGE = "usage: deepspeed --module terapipe_ds.run SCRIPT ARGUMENTS..."
# What launchers put in front of the script's name.
_LOCAL_RANK = ("--local_rank=", "--local-rank=")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script that the arguments name, in this process.

    Args:
        argv: ``[--local_rank=N] SCRIPT ARGUMENTS...``; this process's own if None.

    Returns:
        2 if there is no script to run or a setting is wrong, after one line on stderr; otherwise 0
        at the script's end. ``SystemExit`` and all other exceptions of the script pass through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    launcher: list[str] = []
    while arguments and arguments[0].startswith(_LOCAL_RANK):
        launcher.append(arguments.pop(0))
    if not arguments or arguments[0].startswith("-"):
        found = arguments[0] if arguments else "nothing"
        return _refuse(f"found {found} where the script's name was due; {_USAGE}")
    script = arguments.pop(0)
    if not os.path.isfile(script):
        return _refuse(f"found no script {script!r} in {os.getcwd()}; {_USAGE}")
    try:
        install(arguments)
    except TeraPipeError as error:
        return _refuse(str(error))
    sys.argv = [script, *launcher, *arguments]
    if not sys.flags.safe_path:
        # As Python does for a script, in place of the working directory, which is for modules.
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _run(os.path.abspath(script))
    return 0


def _run(path: str) -> None:
    """Runs a file as ``__main__``, and leaves it there for what the script does at its exit.

    Not by ``runpy``, which puts this module back at the end, and gives the script another name in
    ``sys.argv`` or in ``__file__`` than Python does.
    """
    loader = SourceFileLoader("__main__", path)
    main_module = ModuleType("__main__")
    main_module.__file__, main_module.__loader__ = path, loader
    sys.modules["__main__"] = main_module
    exec(loader.source_to_code(loader.get_data(path), path), vars(main_module))


def _refuse(message: str) -> int:
    """One line for each machine, not one for each of its ranks."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"terapipe_ds.run: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
