"""What megatron-core 0.16.1 needs in order to run without CUDA. Does nothing where CUDA is.

megatron-core asks for the current CUDA device when it allocates, and keeps its random states in the
CUDA generator. On a machine without CUDA both mean the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor


def prepare_megatron() -> None:
    """Points megatron-core's device and random states at the CPU, where there is no CUDA."""
    if torch.cuda.is_available() or megatron_random._get_cuda_rng_state is _get_state:
        return
    # Used as the device of new tensors (tensor_parallel/layers.py, rotary_pos_embedding.py).
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    # Used by recomputation and by the tracker (tensor_parallel/random.py).
    megatron_random._get_cuda_rng_state = _get_state
    megatron_random._set_cuda_rng_state = _set_state
    megatron_random.CudaRNGStatesTracker.add = _add
    megatron_random.CudaRNGStatesTracker.fork = _fork


def _get_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(new_state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _add(tracker: Any, name: str, seed: int) -> None:
    """``CudaRNGStatesTracker.add`` on the CPU's generator."""
    if seed in tracker.seeds_ or name in tracker.states_:
        raise ValueError(f"random state {name!r} with seed {seed} was added twice")
    tracker._is_initialized = True
    tracker.seeds_.add(seed)
    tracker.states_[name] = torch.Generator().manual_seed(seed).get_state()


@contextmanager
def _fork(
    tracker: Any, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
) -> Iterator[None]:
    """``CudaRNGStatesTracker.fork`` on the CPU's generator."""
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)
