"""What megatron-core 0.16.1 needs in order to run without CUDA, and without TransformerEngine.

Does nothing where they are. megatron-core asks for the current CUDA device when it allocates, and
keeps its random states in the CUDA generator. On a machine without CUDA both mean the CPU. Some
places take TransformerEngine for granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


def prepare_megatron() -> None:
    """Points megatron-core's device and random states at the CPU, where there is no CUDA."""
    if not HAVE_TE:
        _do_without_transformer_engine()
    if torch.cuda.is_available() or megatron_random._get_cuda_rng_state is _get_state:
        return
    # Used as the device of new tensors (tensor_parallel/layers.py, rotary_pos_embedding.py).
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    # Used by recomputation and by the tracker (tensor_parallel/random.py).
    megatron_random._get_cuda_rng_state = _get_state
    megatron_random._set_cuda_rng_state = _set_state
    megatron_random.CudaRNGStatesTracker.add = _add
    megatron_random.CudaRNGStatesTracker.fork = _fork
    # Copies counts to the CPU on a stream of its own (moe/token_dispatcher.py); they are there.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NO_STREAM
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_are_here


def _do_without_transformer_engine() -> None:
    # Defined with it alone, but asked for without it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Taken for there, since stand-ins of its classes are; no instance of those exists.
    multi_latent_attention.HAVE_TE = False
    # Its default, False, is taken for "fp8 is asked for" (tensor_parallel/random.py).
    megatron_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


_NO_STREAM = object()


def _counts_are_here(_: Any, __: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    return tokens_per_expert


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
