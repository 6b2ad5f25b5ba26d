"""Every name of megatron-core that this package overrides or replaces, in one place.

Read from megatron-core 0.16.1. ``check_seams`` fails loudly where one has moved;
``tests/models/test_megatron_seams.py`` calls it.
"""

from __future__ import annotations

from operator import attrgetter

import megatron.core
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.moe import router, token_dispatcher

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
