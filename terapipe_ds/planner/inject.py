"""Writes a plan into a DeepSpeed JSON, leaving every other character of the file as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from json.decoder import JSONDecodeError
from typing import Any, NamedTuple

from ..errors import ConfigError
from .planning import Plan

BLOCK = "terapipe"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCH = "train_batch_size"

_SPACE = re.compile(r"\s*")


def inject(plan: Plan, text: str) -> tuple[str, list[str]]:
    """A DeepSpeed JSON with the plan in it.

    Args:
        plan: the plan.
        text: the file's text.

    Returns:
        The new text, and a line for each change.

    Raises:
        ConfigError: if the text is no JSON object, or its batch sizes contradict the plan.
    """
    before = _parse(text)
    size, steps, scheme = plan.for_deepspeed()
    changes = _batch_changes(before, size, steps)
    groups = scheme.groups
    slices: Any = list(groups[0].lengths) if len(groups) == 1 else str(scheme)
    block = before.get(BLOCK)
    wanted = {"slices": slices, "schedule": plan.schedule}
    if plan.warmup or (isinstance(block, dict) and "warmup" in block):
        wanted["warmup"] = plan.warmup
    if isinstance(block, dict):
        span = _members(text)[BLOCK]
        changes[BLOCK] = _Text(_edit(text[span.start : span.stop], wanted, indent=_indent(text)))
        says = {**block, **wanted}
    else:
        changes[BLOCK] = wanted
        says = wanted
    after = _edit(text, changes)
    lines = [
        f"{name}: {json.dumps(before[name]) if name in before else 'not set'} -> "
        f"{json.dumps(says if name == BLOCK else value)}"
        for name, value in changes.items()
        if before.get(name) != (says if name == BLOCK else value)
    ]
    if says.get("enabled") is False:
        lines.append('note: the block has "enabled": false, so nothing is sliced yet')
    if isinstance(before.get(MICRO_BATCH), int) and MICRO_BATCH in changes:
        lines.append(
            "note: DeepSpeed averages the losses of micro-batches; where a loss mask leaves them "
            "unequal numbers of tokens, other micro-batches weigh tokens in another way"
        )
    return after, lines


def _batch_changes(before: Mapping[str, Any], size: int, steps: int) -> dict[str, Any]:
    """The batch sizes that the plan needs, where the file does not have them.

    Raises:
        ConfigError: if the sequences of a step are not those that the plan covers.
    """
    # "auto" is left to a trainer to fill in; DeepSpeed itself has no such value.
    found = {
        name: value
        for name in (BATCH, MICRO_BATCH, STEPS)
        if (value := before.get(name)) not in (None, "auto")
    }
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"inject: found {name} {json.dumps(value)}, allowed are integers of at least 1; "
                f"change {name}"
            )
    covered = size * steps
    if MICRO_BATCH in found:
        has = found[MICRO_BATCH] * found.get(STEPS, 1)
        if STEPS not in found and BATCH in found:
            # DeepSpeed derives the steps from the number of replicas, which is not known here.
            has = covered if found[BATCH] % covered == 0 else found[BATCH]
        if has != covered:
            raise ConfigError(
                f"inject: found {MICRO_BATCH} {found[MICRO_BATCH]} and {STEPS} "
                f"{found.get(STEPS, 'not set')}, {has} sequences a step and replica, allowed are "
                f"{covered}, which the plan covers; plan again with --sequences, or change these"
            )
    if found.get(BATCH, covered) % covered:
        raise ConfigError(
            f"inject: found {BATCH} {found[BATCH]}, allowed is a multiple of {covered}, the "
            "sequences a step and replica that the plan covers; plan again with --sequences, or "
            f"change {BATCH}"
        )
    wanted = {MICRO_BATCH: size, STEPS: steps}
    return {name: value for name, value in wanted.items() if before.get(name) != value}


class _Text(str):
    """A value that is already JSON text."""


class _Span(NamedTuple):
    start: int
    stop: int


def _edit(text: str, changes: Mapping[str, Any], *, indent: str | None = None) -> str:
    """The text of a JSON object with some members set; new ones come last."""
    members = _members(text)
    indent = _indent(text) if indent is None else indent
    newline = "\r\n" if "\r\n" in text else "\n"
    pieces = []
    at = 0
    for name, span in sorted(members.items(), key=lambda entry: entry[1]):
        if name in changes:
            pieces += [text[at : span.start], _dump(changes[name], indent, newline)]
            at = span.stop
    rest = text[at:]
    new = {name: value for name, value in changes.items() if name not in members}
    if new:
        close = rest.rindex("}")
        head = rest[:close].rstrip()
        # A new member stands as the first one does: on a line of its own, or on the same line.
        lead = re.search(r"\{(\s*)", text)
        space = lead.group(1) if lead and members else f"{newline}{indent}"
        added = f",{space or ' '}".join(
            f"{json.dumps(n)}: {_dump(v, indent, newline)}" for n, v in new.items()
        )
        comma = "," if members else ""
        rest = f"{head}{comma}{space or ' ' * bool(members)}{added}{rest[len(head) : close]}"
        rest += text[at:][close:]
    return "".join(pieces) + rest


def _dump(value: Any, indent: str, newline: str) -> str:
    if isinstance(value, _Text):
        return value
    if not isinstance(value, dict) or not indent:
        return json.dumps(value)
    lines = [f"{indent * 2}{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
    return f"{{{newline}" + f",{newline}".join(lines) + f"{newline}{indent}}}"


def _indent(text: str) -> str:
    """What stands before the first member, empty where it is on the first line."""
    found = re.match(r"\s*\{[ \t]*\r?\n([ \t]+)", text)
    return found.group(1) if found else ""


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except JSONDecodeError as error:
        raise ConfigError(
            f"inject: found a file that is not JSON ({error}), allowed is a DeepSpeed "
            "configuration as plain JSON, without comments"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"inject: found {type(content).__name__} in the file, allowed is a JSON object"
        )
    return content


def _members(text: str) -> dict[str, _Span]:
    """Where the value of each member of a JSON object stands; the text has been parsed before."""
    decoder = json.JSONDecoder()
    members = {}
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        _, stop = decoder.raw_decode(text, at)
        if name in members:
            raise ConfigError(f"inject: found {name!r} twice in the file, allowed is once")
        members[name] = _Span(at, stop)
        at = _skip(text, stop)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


__all__ = ["inject"]
