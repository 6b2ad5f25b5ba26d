"""What several parts of ``gpu_profile.py`` need: seed, names, dtypes, and waiting for a device."""

from __future__ import annotations

import platform
from typing import Any

import torch

# An object of ``result.json``.
Row = dict[str, Any]
SEED = 1234


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_dtype(device: torch.device) -> torch.dtype:
    """What layers compute in, and so what kernels are timed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
