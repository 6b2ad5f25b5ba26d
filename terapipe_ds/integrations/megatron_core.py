"""megatron-core's own schedules in token slices, for Megatron-LM and scripts like it.

    torchrun ... -m terapipe_ds.run pretrain_gpt.py --terapipe-config slices.json ...

The JSON holds the keys of the ``"terapipe"`` block. What is rebound is
``megatron.core.pipeline_parallel.get_forward_backward_func``, from which every such script takes
its schedule. Scripts may also take it from :func:`forward_backward_func`. Needs no DeepSpeed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import BLOCK, TeraPipeConfig, read_block
from ..errors import ConfigError
from .after_import import after_import

OPTION = "--terapipe-config"
VARIABLE = "TERAPIPE_CONFIG"

_PACKAGE = "megatron.core.pipeline_parallel"
_SCHEDULES = f"{_PACKAGE}.schedules"
# Where the rebound function keeps megatron's own.
_STOCK = "terapipe_ds_stock"


def install(argv: list[str]) -> bool:
    """Rebinds ``get_forward_backward_func`` as soon as the script has imported megatron-core.

    Args:
        argv: the script's arguments; ``--terapipe-config FILE`` is taken out.

    Returns:
        Whether there is a configuration that is not switched off.

    Raises:
        ConfigError: for a file or a setting that is wrong.
    """
    block = _asked_for(argv)
    if block is None:
        return False
    after_import(_SCHEDULES, functools.partial(rebind, block=block))
    return True


def applies(argv: Sequence[str]) -> bool:
    """Whether there is a configuration that is not switched off.

    Raises:
        ConfigError: for a file or a setting that is wrong.
    """
    return _asked_for(list(argv)) is not None


def _asked_for(argv: list[str]) -> TeraPipeConfig | None:
    path = take_option(argv) or os.environ.get(VARIABLE)
    if not path:
        return None
    block = _block(_read(path))
    return block if block.enabled else None


def take_option(argv: list[str]) -> str | None:
    """Takes ``--terapipe-config`` out of a script's arguments, which does not know it.

    Returns:
        Its value, the last one where it is given twice.

    Raises:
        ConfigError: if the value is missing.
    """
    value = None
    while True:
        places = [
            place
            for place, argument in enumerate(argv)
            if argument == OPTION or argument.startswith(f"{OPTION}=")
        ]
        if not places:
            return value
        argument = argv.pop(places[0])
        if argument != OPTION:
            value = argument.partition("=")[2]
        elif places[0] < len(argv):
            value = argv.pop(places[0])
        else:
            raise ConfigError(f"{OPTION}: found no file after it, allowed is a JSON file; give one")


def rebind(schedules: Any, *, block: TeraPipeConfig) -> None:
    """Lets ``get_forward_backward_func`` give a sliced schedule.

    Args:
        schedules: ``megatron.core.pipeline_parallel.schedules``.
        block: the settings.
    """
    stock = schedules.get_forward_backward_func
    if hasattr(stock, _STOCK):
        return

    @functools.wraps(stock)
    def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[Any]]:
        return _schedule(block)

    setattr(get_forward_backward_func, _STOCK, stock)
    # The package takes the name from the module; unless it is being imported, it has done so.
    for module in (schedules, sys.modules.get(_PACKAGE)):
        if getattr(module, "get_forward_backward_func", None) is stock:
            module.get_forward_backward_func = get_forward_backward_func  # type: ignore[union-attr]


def forward_backward_func(block: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """A sliced schedule, for scripts that choose it themselves.

    Args:
        block: the settings, as in the ``"terapipe"`` block.

    Returns:
        What takes the place of ``get_forward_backward_func()``: same arguments, same result. The
        same one for the same settings.

    Raises:
        ConfigError: for a setting that is wrong.
    """
    return _schedule(_block(dict(block)))


def _schedule(block: TeraPipeConfig) -> Callable[..., list[Any]]:
    if not block.enabled:
        schedules = import_module(_SCHEDULES)
        function = schedules.get_forward_backward_func
        stock: Callable[..., list[Any]] = getattr(function, _STOCK, function)()
        return stock
    # One for all calls: it holds the connections between stages.
    key = json.dumps(block.describe(), sort_keys=True)
    if key not in _made:
        # Here: it needs megatron.
        from .megatron_schedule import SlicedSchedule

        _made[key] = SlicedSchedule(block)
    return _made[key]


_made: dict[str, Callable[..., list[Any]]] = {}


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{OPTION}: found {path!r}, which cannot be read ({reason}), allowed is a JSON file "
            f"with the keys of the {BLOCK!r} block; change it, or {VARIABLE}"
        ) from None


def _block(content: Any) -> TeraPipeConfig:
    block = read_block({BLOCK: content})
    assert block is not None
    if block.slices == "auto":
        raise ConfigError(
            f'{BLOCK}.slices: found "auto", allowed are a number of slices, lengths or groups with '
            "megatron's own schedules, which are not measured yet; set slices (terapipe plan finds "
            "some)"
        )
    if block.loss == "per_slice":
        raise ConfigError(
            f'{BLOCK}.loss: found "per_slice", allowed are "auto" and "whole_sequence" with '
            "megatron's own schedules, whose loss functions may do anything; change loss"
        )
    if block.trace is not None:
        raise ConfigError(
            f"{BLOCK}.trace: found {block.trace!r}, allowed is none with megatron's own schedules; "
            "drop trace"
        )
    return block


__all__ = ["applies", "forward_backward_func", "install", "rebind", "take_option"]
