"""Token-slice pipeline parallelism (TeraPipe, arXiv 2102.07988) for DeepSpeed and megatron-core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, DataIteratorEnded, RankFailure, ScheduleError, TeraPipeError
from .scheme import SliceScheme

if TYPE_CHECKING:
    from .runtime.adapter import SequenceAdapter, TensorDims
    from .runtime.engine import TokenSliceEngine
    from .runtime.launch import initialize

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataIteratorEnded",
    "RankFailure",
    "ScheduleError",
    "SequenceAdapter",
    "SliceScheme",
    "TensorDims",
    "TeraPipeError",
    "TokenSliceEngine",
    "__version__",
    "initialize",
]

# Loaded on first use: these need torch and DeepSpeed, while schemes and schedules do not.
_LAZY = {
    "SequenceAdapter": ".runtime.adapter",
    "TensorDims": ".runtime.adapter",
    "TokenSliceEngine": ".runtime.engine",
    "initialize": ".runtime.launch",
}


_SUBPACKAGES = ("models", "planner", "runtime", "schedule")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
