"""What cannot be sliced correctly behind megatron's schedules, and what to change instead."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from torch import nn

from ..errors import ConfigError
from ..models.built_layers import check_built_layers
from ..models.refuse import check_config
from .megatron_recording import levels

_OFF = "or run with TERAPIPE=0"

# Settings of megatron's configuration: name, the value that is right, and why.
_REFUSED = (
    ("virtual_pipeline_model_parallel_size", None, "slices have an order of their own"),
    ("overlap_moe_expert_parallel_comm", False, "it runs two micro-batches at once"),
    ("hybrid_context_parallel", False, "it cuts sequences in another way"),
    ("defer_embedding_wgrad_compute", False, "it keeps one activation a micro-batch"),
    ("delay_wgrad_compute", False, "it keeps one activation a layer"),
    (
        "num_microbatches_with_partial_activation_checkpoints",
        None,
        "it counts micro-batches in flight",
    ),
)


def check_call(
    *,
    model: Any,
    data_iterator: Any,
    seq_length: int,
    decoder_seq_length: int | None,
    forward_only: bool,
    collect_non_loss_data: bool,
    adjust_tensor_shapes_fn: Any,
) -> None:
    """Raises for arguments of megatron's schedules that slices cannot heed.

    Raises:
        ConfigError: names the argument, what was found and what is allowed.
    """
    for what in (model, data_iterator):
        if isinstance(what, list) and len(what) != 1:
            raise _refusal(
                "virtual_pipeline_model_parallel_size",
                f"{len(what)} pieces of the model on a stage",
                "1",
                "slices have an order of their own",
            )
    if adjust_tensor_shapes_fn is not None:
        raise _refusal(
            "adjust_tensor_shapes_fn", "a function", "None", "slices have shapes of their own"
        )
    if decoder_seq_length not in (None, seq_length):
        raise _refusal(
            "decoder_seq_length",
            decoder_seq_length,
            f"None or the seq_length {seq_length}",
            "an encoder attends to all tokens",
        )
    if collect_non_loss_data and not forward_only:
        raise _refusal(
            "collect_non_loss_data", True, "False in training", "it gives no loss to train with"
        )


def check_model(model: nn.Module, *, stages: int, splits_backward: bool) -> None:
    """Raises for a model, or a setting of its configuration, that cannot be sliced correctly.

    Args:
        model: this rank's stage, in its wrappers.
        stages: of the pipeline.
        splits_backward: whether the schedule puts weights' gradients off.

    Raises:
        ConfigError: names what was found and what is allowed.
    """
    *wrappers, gpt = levels(model)
    for wrapper in wrappers:
        if not isinstance(wrapper, DistributedDataParallel | Float16Module):
            raise _refusal(
                "model",
                f"the wrapper {type(wrapper).__name__}",
                "megatron-core's DistributedDataParallel and Float16Module",
                "another may count on one forward for each backward",
            )
    if not isinstance(gpt, GPTModel):
        raise _refusal("model", type(gpt).__name__, "GPTModel", "it is known how to cut it")
    if gpt.position_embedding_type == "mrope":
        raise _refusal(
            "position_embedding_type", "mrope", "another", "it takes positions of three dimensions"
        )
    config = gpt.config
    check_config(config, under_deepspeed=False)
    for name, allowed, reason in _REFUSED:
        found = getattr(config, name, allowed)
        if found != allowed:
            raise _refusal(name, repr(found), repr(allowed), reason)
    check_built_layers(gpt)
    if splits_backward and not any(
        isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        for layer in gpt.decoder.modules()
    ):
        raise ConfigError(
            'terapipe.schedule: found "zb-h1", allowed are "1f1b" and "gpipe" for this model '
            "(TransformerEngine's linear layers cannot put their weight gradients off); change "
            "schedule, or use megatron-core's local layer spec"
        )
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if stages > 1 and torch.distributed.get_backend() == "nccl" and connections == "1":
        raise _refusal(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            1,
            "2 or more",
            "in one queue, a receive that waits would hold up the computation its sender needs",
        )


def _refusal(setting: str, found: Any, allowed: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{setting}: found {found}, allowed is {allowed} with token slices ({reason}); change "
        f"{setting}, {_OFF}"
    )


__all__ = ["check_call", "check_model"]
