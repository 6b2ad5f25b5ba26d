"""The ``"terapipe"`` block of the DeepSpeed JSON.

DeepSpeed ignores a block that it does not know, typing errors included, so this one is validated
here: an unknown key or an impossible value is refused in one line.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from .errors import ConfigError
from .schedule.order import check_warmup
from .scheme import SliceScheme, SlicesSetting, parse_lengths

BLOCK = "terapipe"

SWITCH = "TERAPIPE"
"""The environment variable that switches slicing off for one run, with the value 0."""


class TeraPipeConfig(BaseModel):
    """The validated block; build it with :func:`read_block`."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    enabled: bool = Field(True, strict=True)
    """Whether token slicing is used at all; false behaves as stock DeepSpeed does."""

    slices: Literal["auto"] | SlicesSetting = "auto"
    """``"auto"``, a number of slices, a list of lengths, or groups as JSON lists or as text."""

    schedule: Literal["1f1b", "gpipe", "zb-h1"] = "1f1b"
    """The order of slices, see ``terapipe_ds.schedule``; ``gpipe`` is the paper's."""

    warmup: int | Literal["auto"] = "auto"
    """How many more slices a stage may hold, so that slices of unequal times do not stop it;
    ``"auto"`` is what the planner finds with ``"slices": "auto"``, and otherwise 0."""

    loss: Literal["auto", "per_slice", "whole_sequence"] = "auto"
    """``per_slice`` needs a loss that is a mean over valid tokens; ``auto`` asks the adapter."""

    granularity: int = Field(8, ge=1, strict=True)
    """Planned slice lengths are multiples of this many tokens; explicit lengths may be any."""

    replan: bool = Field(False, strict=True)
    """With ``"auto"``: plan anew on resume, instead of using the plan in the checkpoint."""

    profile_budget_s: float = Field(120.0, gt=0, strict=True, allow_inf_nan=False)
    """With ``"auto"``: seconds for measuring the stages, where no earlier measurement serves."""

    memory_gib: float | None = Field(None, gt=0, strict=True, allow_inf_nan=False)
    """With ``"auto"``: plans that need more on a rank are dropped; a GPU's own memory if None."""

    trace: str | None = Field(None, strict=True, min_length=1)
    """A folder for timelines of the steps in ``trace_steps``."""

    trace_steps: list[Annotated[int, Field(ge=0, strict=True)]] = [2]
    """Steps to trace, from 0; the first ones still claim memory and connect."""

    timeout_s: float = Field(1800.0, gt=0, strict=True, allow_inf_nan=False)
    """Seconds that a rank may wait for another before the job is ended."""

    @field_validator("slices", mode="before")
    @classmethod
    def _read_slices(cls, value: Any) -> Any:
        if value == "auto" or isinstance(value, SliceScheme):
            return value
        if isinstance(value, str):
            return SliceScheme.from_text(value)
        if isinstance(value, list | tuple) and value:
            if any(isinstance(entry, list | tuple) for entry in value):
                return SliceScheme(value)
            return parse_lengths(value)
        if type(value) is int and value >= 1:
            return value
        raise ConfigError(
            f'slices: found {value!r}, allowed are "auto", a number of slices, '
            "a list of slice lengths, or groups [[sequences, [lengths...]], ...]"
        )

    @field_validator("warmup", mode="before")
    @classmethod
    def _read_warmup(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "auto":
            return value
        if type(value) is not int or value < 0:
            raise ConfigError(
                f'warmup: found {value!r}, allowed are "auto" and integers of at least 0'
            )
        # Without a schedule where that is wrong, which is said first.
        check_warmup(info.data.get("schedule", "1f1b"), value)
        return value

    @property
    def given_warmup(self) -> int:
        """The slack where no planner chooses it."""
        return 0 if self.warmup == "auto" else self.warmup

    def describe(self) -> dict[str, Any]:
        """The settings as JSON values by their full name, to compare between ranks."""
        slices: Any = self.slices
        if isinstance(slices, SliceScheme):
            slices = str(slices)
        elif isinstance(slices, tuple):
            slices = list(slices)
        settings = {**self.model_dump(exclude={"slices"}), "slices": slices}
        return {f"{BLOCK}.{name}": value for name, value in settings.items()}


def switched_off() -> bool:
    """Whether the environment switches slicing off.

    Raises:
        ConfigError: for a value that says neither.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ConfigError(
            f"{SWITCH}: found {value!r}, allowed are 0 (off) and 1; change or unset it"
        )
    return value == "0"


def read_block(ds_config: dict[str, Any]) -> TeraPipeConfig | None:
    """The validated block of a DeepSpeed configuration, or None where there is none.

    Raises:
        ConfigError: one line that names the key, what was found and what is allowed.
    """
    if BLOCK not in ds_config:
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, dict):
        raise ConfigError(f"{BLOCK}: found {block!r}, allowed is a JSON object")
    try:
        return TeraPipeConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_one_line(error, block)) from None


def _one_line(error: ValidationError, block: dict[str, Any]) -> str:
    """The first fault as one line; pydantic reports several lines, with links."""
    fault = error.errors()[0]
    key = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(TeraPipeConfig.model_fields))
        return f"{BLOCK}.{key}: found an unknown key, allowed are {allowed}"
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{BLOCK}.{cause}"
    allowed = fault["msg"].removeprefix("Input should be ")
    return f"{BLOCK}.{key}: found {json.dumps(block.get(key), default=repr)}, allowed is {allowed}"
