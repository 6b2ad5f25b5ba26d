"""``terapipe doctor``: whether this environment, script and DeepSpeed JSON will slice.

Gathers what there is, asks the checks in ``checks/``, and puts their findings on one screen. No
rank is started and nothing of the script is run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from .checks import libraries, script, settings, surroundings
from .checks.findings import Finding, note, one_line
from .config import BLOCK, TeraPipeConfig
from .errors import ConfigError
from .files import cache_folder
from .integrations.arguments import number_of, value_of
from .integrations.deepspeed_script import OPTION
from .integrations.megatron_core import OPTION as BLOCK_OPTION
from .integrations.megatron_core import VARIABLE
from .models.preset import ModelPreset, load_preset
from .versions import MODULES


@dataclass(frozen=True)
class Case:
    """What is asked about.

    Attributes:
        ds_config: the DeepSpeed JSON, if one was named.
        block: a JSON of the block's keys alone, if one was named.
        script: the training script, if one was named.
        argv: its arguments.
        model: the shape of its model, if it was given.
    """

    ds_config: dict[str, Any] | None = None
    block: Any = None
    script: Path | None = None
    argv: list[str] = field(default_factory=list)
    model: ModelPreset | None = None


def read_case(
    *,
    ds_config: Path | None = None,
    command: Sequence[str] = (),
    model: Path | None = None,
) -> Case:
    """Reads the files that are named.

    Args:
        ds_config: a DeepSpeed JSON, if the script's arguments do not name it.
        command: the script and its arguments.
        model: a model's JSON as in ``configs/models``.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    argv = list(command[1:])
    named = value_of(OPTION, argv)
    if ds_config is not None and named is not None:
        raise ConfigError(
            f"doctor: found --deepspeed-config with {OPTION} among the script's arguments, allowed "
            "is one of these; drop one"
        )
    path = ds_config if named is None else Path(named)
    block = value_of(BLOCK_OPTION, argv)
    if not block and command:
        # As the script will find it.
        block = os.environ.get(VARIABLE)
    return Case(
        ds_config=None if path is None else _read(path, OPTION),
        block=_read(Path(block), BLOCK_OPTION) if block else None,
        script=Path(command[0]) if command else None,
        argv=argv,
        model=None if model is None else load_preset(model),
    )


def _read(path: Path, option: str) -> dict[str, Any]:
    try:
        text = path.read_text()
        try:
            content = json.loads(text)
        except ValueError:
            # What DeepSpeed reads with: JSON with comments, among others.
            content = import_module("hjson").loads(text)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"{option}: found {path}, which cannot be read ({one_line(error)}), allowed is a JSON "
            "file; change the path or the file"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{option}: found {type(content).__name__} in {path}, allowed is a JSON object; change "
            "the file"
        )
    return dict(content)


def examine(case: Case) -> list[Finding]:
    """Everything that was found, in the order of the report."""
    return [*_of_the_installation(case), *_of_the_surroundings(), *_of_the_settings(case)]


def _of_the_installation(case: Case) -> Iterator[Finding]:
    yield from libraries.check_python(libraries.python_version())
    found = {name: libraries.load(name) for name in MODULES}
    broken = {name for name, library in found.items() if library.error is not None}
    for name, library in found.items():
        # These stand on torch and DeepSpeed, whatever else they ask about.
        known = library.version != libraries.UNKNOWN
        asks = known and name in libraries.SEAMS and not broken & {"torch", "deepspeed", name}
        yield from libraries.check_library(library, libraries.moved_names(name) if asks else None)
    if "deepspeed" in broken:
        yield note("device", "not known without DeepSpeed")
        return
    device = libraries.find_device()
    yield from libraries.check_device(device, case.ds_config or {})
    yield from surroundings.check_queues(device.backend, os.environ)


def _of_the_surroundings() -> Iterator[Finding]:
    yield from surroundings.check_switch()
    yield from surroundings.check_cache(cache_folder())
    folder = surroundings.extensions_folder(os.environ)
    yield from surroundings.check_locks(folder, now=time.time())
    path = os.environ.get("PATH", os.defpath)
    yield from surroundings.check_ninja(surroundings.programs("ninja", path))


def _of_the_settings(case: Case) -> Iterator[Finding]:
    block = None
    # A file of the block's keys alone is for scripts that build no DeepSpeed engine.
    source = case.ds_config if case.block is None else {BLOCK: case.block}
    if source is None:
        yield note("block", "no DeepSpeed JSON was named, so its settings are not known")
    else:
        block, findings = settings.check_block(source)
        yield from findings
    if case.ds_config is not None:
        yield from settings.check_ds_config(case.ds_config)
    if case.script is not None:
        yield from _of_the_script(case, case.script, block)
    yield from _of_the_sequences(case, block)


def _of_the_script(case: Case, path: Path, block: TeraPipeConfig | None) -> Iterator[Finding]:
    imports, findings = script.check_script(path)
    yield from findings
    names, findings = script.check_integrations(case.argv)
    yield from findings
    yield from script.check_options(
        case.argv, names=names, imports=imports, ds_config=case.ds_config or {}, block=block
    )


def _of_the_sequences(case: Case, block: TeraPipeConfig | None) -> Iterator[Finding]:
    at_most = None if case.model is None else case.model.seq_length
    seq_length = number_of("--seq-length", case.argv) or at_most
    if block is not None and seq_length is not None:
        yield from settings.check_fit(
            block,
            seq_length=seq_length,
            multiple_of=script.multiple_of(case.argv),
            sequences=settings.sequences_of(case.ds_config or {}),
            at_most=at_most,
        )


def counts(findings: Sequence[Finding]) -> tuple[int, int]:
    """How many findings are refused, and how many are notes."""
    statuses = [finding.status for finding in findings]
    return statuses.count("refused"), statuses.count("note")


def as_text(findings: Sequence[Finding]) -> str:
    """The report for people, a line for each finding, and what follows from them."""
    width = max(len(finding.check) for finding in findings)
    lines = [f"{found.status:9}{found.check:{width + 2}}{found.text}" for found in findings]
    refused, notes = counts(findings)
    verdict = f"{refused} refused: change these" if refused else "nothing speaks against slicing"
    if notes:
        verdict += f" ({notes} {'note' if notes == 1 else 'notes'})"
    return "\n".join([*lines, "", verdict])


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "refused": counts(findings)[0],
        "findings": [asdict(finding) for finding in findings],
    }


__all__ = ["Case", "as_data", "as_text", "counts", "examine", "read_case"]
