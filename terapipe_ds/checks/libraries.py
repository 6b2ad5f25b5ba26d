"""Python, torch, DeepSpeed and megatron-core: there, tested, and with the names relied on."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ..errors import TeraPipeError
from ..runtime.refuse_settings import backend_refusal
from ..versions import MODULES, OLDEST_PYTHON, TESTED, TESTED_PYTHON, numbers, outside
from .findings import Finding, note, ok, one_line, refused

# Where this package stands on the private names of another.
SEAMS = {
    "deepspeed": ("terapipe_ds.runtime.deepspeed_seams",),
    "megatron-core": (
        "terapipe_ds.models.megatron_seams",
        "terapipe_ds.integrations.megatron_seams",
    ),
}


UNKNOWN = "unknown"
"""The version of another package of that name that comes first on the path."""


class Library(NamedTuple):
    """A package, as it is here.

    Attributes:
        version: None if it is not installed.
        error: why it cannot be imported, in one line; None if it can.
    """

    name: str
    version: str | None
    error: str | None


class Device(NamedTuple):
    """What DeepSpeed would train on."""

    name: str
    number: int
    bf16: bool
    fp16: bool
    backend: str


def load(name: str) -> Library:
    """Imports a package of ``MODULES``, without a word of its own on the screen."""
    try:
        with _quietly():
            module = import_module(MODULES[name])
    except Exception as error:
        try:
            return Library(name, version(name), one_line(error))
        except PackageNotFoundError:
            return Library(name, None, one_line(error))
    return Library(name, str(getattr(module, "__version__", UNKNOWN)), None)


def moved_names(name: str) -> str | None:
    """What a package of ``SEAMS`` lacks that this one relies on, in one line; None if nothing."""
    try:
        with _quietly():
            for module in SEAMS[name]:
                import_module(module).check_seams()
    except TeraPipeError as error:
        return str(error)
    except Exception as error:
        return (
            f"{name}: found a version whose names have moved ({one_line(error)}), allowed is "
            f"{TESTED[name]}; install that version"
        )
    return None


def find_device() -> Device:
    """DeepSpeed's accelerator on this machine, without starting a rank."""
    with _quietly():
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        return Device(
            accelerator.device_name(),
            accelerator.device_count(),
            bool(accelerator.is_bf16_supported()),
            bool(accelerator.is_fp16_supported()),
            accelerator.communication_backend_name(),
        )


def check_python(found: str) -> list[Finding]:
    """Whether this interpreter has been tested; ``found`` is its version."""
    if numbers(found) < numbers(OLDEST_PYTHON):
        return [refused("python", f"found {found}, allowed is {OLDEST_PYTHON} or newer; change it")]
    if outside(found, TESTED_PYTHON):
        return [note("python", f"{found}, tested is {TESTED_PYTHON}")]
    return [ok("python", f"{found}, tested is {TESTED_PYTHON}")]


def check_library(library: Library, moved: str | None = None) -> list[Finding]:
    """Whether a package works, has been tested, and has the names that slices rely on.

    Args:
        library: as of :func:`load`.
        moved: as of :func:`moved_names`.
    """
    name, tested = library.name, TESTED[library.name]
    if library.version is None:
        return [
            refused(name, f"found none ({library.error}), allowed is {tested}; pip install {name}")
        ]
    if library.error is not None:
        return [
            refused(
                name,
                f"found {library.version}, which cannot be imported ({library.error}), allowed is "
                f"{tested}; install it again",
            )
        ]
    if library.version == UNKNOWN:
        return [
            note(
                name,
                f"another package of this name comes first on the path, tested is {tested}; with "
                "Megatron-DeepSpeed's own that is right",
            )
        ]
    found = [] if moved is None else [refused(name, moved)]
    if outside(library.version, tested):
        found.append(note(name, f"{library.version}, tested is {tested}: compare with TERAPIPE=0"))
    return found or [ok(name, f"{library.version}, tested is {tested}")]


def check_device(device: Device, ds_config: Mapping[str, Any]) -> list[Finding]:
    precisions = " ".join(
        name for name, there in (("bf16", device.bf16), ("fp16", device.fp16)) if there
    )
    found = [
        ok(
            "device",
            f"{device.number} x {device.name}, {precisions or 'neither bf16 nor fp16'}, slices are "
            f"sent by {device.backend}",
        )
    ]
    for name, there in (("bf16", device.bf16), ("fp16", device.fp16)):
        section = ds_config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True and not there:
            found.append(
                refused(
                    "device",
                    f"{name}.enabled: found true on {device.name}, which lacks {name}, allowed is "
                    f"{precisions or 'fp32'}; set it to false",
                )
            )
    unfit = backend_refusal(device.backend)
    if unfit is not None:
        found.append(refused("device", unfit))
    return found


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


__all__ = [
    "SEAMS",
    "UNKNOWN",
    "Device",
    "Library",
    "check_device",
    "check_library",
    "check_python",
    "find_device",
    "load",
    "moved_names",
    "python_version",
]
