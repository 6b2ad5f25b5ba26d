"""A training script and its arguments, read without running anything of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import integrations
from ..config import TeraPipeConfig
from ..errors import ConfigError
from ..integrations.arguments import number_of
from ..integrations.megatron_deepspeed_options import SPLIT_BACKWARD, refused_options
from ..schedule.order import splits_backward
from .findings import Finding, note, ok, one_line, refused

_DEEPSPEED = "deepspeed_script"


def check_script(path: Path) -> tuple[set[str], list[Finding]]:
    """The modules that a script imports by name, and the findings."""
    if not path.is_file():
        return set(), [
            refused("script", f"script: found none at {path}, allowed is a file; change the path")
        ]
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError) as error:
        return set(), [
            refused(
                "script",
                f"script: found {path}, which is no Python ({one_line(error)}), allowed is a "
                "training script; change the path",
            )
        ]
    return _imports(tree), [ok("script", str(path))]


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def is_like_megatron_deepspeed(imports: set[str]) -> bool:
    """Whether a script takes DeepSpeed and megatron's old packages, besides ``megatron.core``."""
    of_megatron = any(
        name.partition(".")[0] == "megatron" and not f"{name}.".startswith("megatron.core.")
        for name in imports
    )
    return of_megatron and any(name.partition(".")[0] == "deepspeed" for name in imports)


def check_integrations(argv: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """The integrations that would apply to a script with these arguments, and the findings."""
    try:
        names = integrations.applying(argv)
    except ConfigError as error:
        return [], [refused("integration", str(error))]
    if not names:
        return [], [note("integration", "none applies: with these arguments nothing is sliced")]
    return names, [ok("integration", f"{name}: {_says(name)}") for name in names]


def _says(name: str) -> str:
    module = import_module(f"{integrations.__name__}.{name}")
    return (module.__doc__ or "").partition("\n")[0].replace("``", "").rstrip(".")


def check_options(
    argv: Sequence[str],
    *,
    names: Sequence[str],
    imports: set[str],
    ds_config: Mapping[str, Any],
    block: TeraPipeConfig | None,
) -> list[Finding]:
    """Which of a script's options cannot be sliced.

    Args:
        argv: the script's arguments.
        names: of the integrations that apply.
        imports: modules that the script imports.
        ds_config: its DeepSpeed JSON.
        block: its settings, where they are valid.
    """
    if _DEEPSPEED not in names:
        return []
    lines = refused_options(argv, ds_config)
    if is_like_megatron_deepspeed(imports):
        if block is not None and splits_backward(block.schedule):
            lines.append(SPLIT_BACKWARD)
        return [refused("options", line) for line in lines] or [
            ok("options", "none that slices cannot do with a model like Megatron-DeepSpeed's")
        ]
    # Another script may mean something else by them.
    return [note("options", f"if the model is Megatron-DeepSpeed's: {line}") for line in lines]


def multiple_of(argv: Sequence[str]) -> int:
    """What slice lengths have to be multiples of, by a script's megatron options."""
    if "--sequence-parallel" not in argv:
        return 1
    return number_of("--tensor-model-parallel-size", argv) or 1


__all__ = [
    "check_integrations",
    "check_options",
    "check_script",
    "is_like_megatron_deepspeed",
    "multiple_of",
]
