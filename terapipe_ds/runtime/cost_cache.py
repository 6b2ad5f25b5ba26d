"""Costs on disk: what they depend on, the key made of it, reading and writing.

The key has to be the same in every process, so it holds nothing with an address in it, and it has
to tell models apart that print alike, so it holds the layers' plain settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.utils.logging import print_dist
from torch import Tensor

from ..errors import TeraPipeError
from ..files import CACHE_VARIABLE, cache_folder
from ..planner.cost import CostModel
from ..schedule.order import splits_backward
from .agreement import settings
from .header import BatchShape

if TYPE_CHECKING:
    from .engine import TokenSliceEngine


def about(engine: TokenSliceEngine, shape: BatchShape) -> dict[str, Any]:
    """Everything that a stage's times depend on; also the cache's key."""
    layers = [
        [_plain(module) for name, module in engine.module.named_modules() if name],
        [[name, str(p.dtype), list(p.shape), p.requires_grad] for name, p in _named(engine)],
    ]
    recompute = engine.module.activation_checkpoint_func
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    compared = settings(engine.terapipe, engine._config)
    keep = ("version", "pipeline", "bf16", "zero_optimization")
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "layers": hashlib.sha256(json.dumps(layers).encode()).hexdigest(),
        "sequences": shape[0],
        "seq_length": shape[1],
        "granularity": math.lcm(engine.terapipe.granularity, engine._adapter.multiple_of),
        "stage": engine.stage_id,
        "stages": engine.num_stages,
        "ranks": dist.get_world_size(),
        "tensor_parallel": engine.grid.get_slice_parallel_world_size(),
        "recompute": [
            engine.module.activation_checkpoint_interval,
            f"{recompute.__module__}.{recompute.__qualname__}",
        ],
        "loss": engine._loss_mode,
        "splits_backward": splits_backward(engine.terapipe.schedule),
        "autocast": torch.is_autocast_enabled(device.type),
        **{key: value for key, value in compared.items() if any(word in key for word in keep)},
    }


def _plain(module: torch.nn.Module) -> list[Any]:
    """A layer's type and plain settings, its configuration's too; the same in every process."""

    def simple(values: dict[str, Any]) -> dict[str, str]:
        return {
            name: repr(value)
            for name, value in sorted(values.items())
            if isinstance(value, bool | int | float | str | tuple | list | torch.dtype | None)
            and " at 0x" not in repr(value)
        }

    config = getattr(module, "config", None)
    settings = simple(vars(config)) if dataclasses.is_dataclass(config) else {}
    return [type(module).__qualname__, simple(vars(module)), settings]


def _named(engine: TokenSliceEngine) -> list[tuple[str, Tensor]]:
    return list(engine.module.named_parameters())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'cpu'}, {len(os.sched_getaffinity(0))} cores"


def cache_path(stages: list[dict[str, Any]]) -> Path:
    digest = hashlib.sha256(json.dumps(stages, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / f"cost-{digest[:16]}.json"


def read_cache(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return CostModel.load(path).to_dict()
    except TeraPipeError as error:
        log(f"{error}; measuring again")
        return None


def write_cache(path: Path, model: CostModel) -> None:
    try:
        model.save(path)
    except OSError as error:
        log(f"the costs could not be kept ({error}); set {CACHE_VARIABLE} to a folder")


def log(message: str) -> None:
    print_dist(f"terapipe: {message}", ranks=[0])


__all__ = ["about", "cache_path", "log", "read_cache", "write_cache"]
