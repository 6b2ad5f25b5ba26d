"""Every name of megatron-core that this package overrides or replaces, in one place.

Read from megatron-core 0.16.1, and 0.15.3 where it differs. ``check_seams`` fails loudly where one
has moved; ``tests/models/test_megatron_seams.py`` calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import megatron.core
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.moe import moe_layer, moe_utils, router, token_dispatcher
from torch import Tensor

from ..errors import TeraPipeError
from ..versions import TESTED

SEAMS = (
    # models/megatron_core.py: a core attention of our own.
    (attention, "SelfAttentionSubmodules"),
    (multi_latent_attention, "MLASelfAttention"),
    # models/experts.py: auxiliary losses of slices.
    (router, "TopKRouter._apply_aux_loss"),
    (router, "TopKRouter._apply_seq_aux_loss"),
    (router, "TopKRouter._apply_global_aux_loss"),
    (router, "TopKRouter.attach_and_log_load_balancing_loss"),
    (router, "TopKRouter.apply_z_loss"),
    (router, "TopKRouter.get_aux_loss_coeff"),
    (router, "TopKRouter.is_aux_loss_enabled"),
    # models/without_cuda.py.
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (megatron_random, "_MODEL_PARALLEL_RNG_TRACKER_NAME"),
    (megatron_random, "CudaRNGStatesTracker.add"),
    (megatron_random, "CudaRNGStatesTracker.fork"),
    (megatron_random, "CheckpointWithoutOutput"),
    (token_dispatcher, "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"),
)


def check_seams() -> None:
    """Raises where the installed megatron-core lacks a name that this package relies on.

    Raises:
        TeraPipeError: names what is missing and the version that is known to work.
    """
    # What these import is relied on too.
    from . import gpt  # noqa: F401

    missing = []
    for owner, name in SEAMS:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            missing.append(f"{owner.__name__.rpartition('.')[2]}.{name}")
    if missing:
        raise TeraPipeError(
            f"megatron-core: found version {megatron.core.__version__} without "
            f"{', '.join(missing)}, allowed is {TESTED['megatron-core']}; install that version"
        )


_HAS_DP = "reduce_group_has_dp"
_LOGS_DP = _HAS_DP in inspect.signature(moe_utils.save_to_aux_losses_tracker).parameters


def log_auxiliary_loss(
    name: str, value: Tensor, layer: int | None, layers: int, *, group: Any, over_replicas: bool
) -> None:
    """``save_to_aux_losses_tracker``, which asks only since 0.16 whether a group spans replicas.

    Args:
        name: as in megatron's tracker.
        value: of the loss.
        layer: its layer, from 1.
        layers: of the model.
        group: over which it is summed.
        over_replicas: whether this group has data-parallel ranks.
    """
    spans = {_HAS_DP: over_replicas} if _LOGS_DP else {}
    moe_utils.save_to_aux_losses_tracker(name, value, layer, layers, reduce_group=group, **spans)


def put_router(mlp: Any, make: Callable[..., Any]) -> None:
    """Puts a router into the spec of a layer of experts.

    Args:
        mlp: megatron's spec, changed.
        make: takes what ``TopKRouter`` takes.
    """
    if hasattr(mlp.submodules, "router"):
        mlp.submodules.router = make
        return

    class WithRouter(mlp.module):  # type: ignore[misc,name-defined]
        """``MoELayer`` before megatron-core 0.16, which makes its router by itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            before = moe_layer.TopKRouter
            moe_layer.TopKRouter = make
            try:
                super().__init__(*args, **kwargs)
            finally:
                moe_layer.TopKRouter = before

    mlp.module = WithRouter
