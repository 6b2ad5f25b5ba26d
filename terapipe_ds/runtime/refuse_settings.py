"""What is refused by settings alone, before there is an engine, a model or a rank.

Needs neither torch nor DeepSpeed: ``terapipe doctor`` asks here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Through which slices can be sent.
BACKENDS = ("nccl", "gloo")

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# Switches of DeepSpeed's JSON that would be ignored or go wrong in slices, and why.
_REFUSED_FEATURES = (
    ("progressive_layer_drop.enabled", "every slice of a sequence must go through the same layers"),
    ("data_efficiency.data_routing.random_ltd.enabled", "it drops tokens within a slice"),
    ("compile.deepcompile", "compiled code would be specialised on one slice"),
    ("flops_profiler.enabled", "it would profile one slice for a micro-batch"),
)

_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning.enabled"


def refused_settings(ds_config: Mapping[str, Any], *, zero_stage: int, fp16: bool) -> list[str]:
    """Settings of a DeepSpeed configuration that cannot be sliced correctly, a line for each.

    Args:
        ds_config: the JSON as it was given.
        zero_stage: its ZeRO stage.
        fp16: whether it asks for fp16.
    """
    refused = []
    if zero_stage > 1:
        refused.append(
            f"zero_optimization.stage: found {zero_stage}, allowed are 0 and 1 (pipeline "
            "parallelism keeps whole gradients on a stage); change zero_optimization.stage"
        )
    if fp16 and not zero_stage:
        refused.append(
            "zero_optimization.stage: found 0 with fp16, allowed is 1 (without ZeRO, DeepSpeed "
            "0.19.8 divides gradients by a loss scale that the loss was not multiplied with); set "
            "zero_optimization.stage to 1, or use bf16"
        )
    refused += [
        f"{path}: found true, allowed is false with token slices ({reason}); switch it off"
        for path, reason in _REFUSED_FEATURES
        if _value_at(ds_config, path) is True
    ]
    return refused


def refused_json(ds_config: Mapping[str, Any]) -> list[str]:
    """As :func:`refused_settings`, from the JSON alone."""
    zero = ds_config.get("zero_optimization")
    # DeepSpeed still reads true, for stage 1.
    stage = int(zero) if isinstance(zero, bool) else _value_at(ds_config, "zero_optimization.stage")
    fp16 = _value_at(ds_config, "fp16.enabled") is True
    return refused_settings(ds_config, zero_stage=stage if isinstance(stage, int) else 0, fp16=fp16)


def has_sampled_curriculum(ds_config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's sampler would shorten sequences, see :func:`curriculum_refusal`."""
    return _value_at(ds_config, _CURRICULUM) is True


def curriculum_refusal(stages: int | str) -> str:
    """Why DeepSpeed's sampler cannot choose for several stages."""
    return (
        f"{_CURRICULUM}: found true with training_data and {stages} stages, allowed is one stage "
        "(DeepSpeed 0.19.8's sampler sends every stage's replicas the first rank's choice, and "
        "only the first stage's have that rank among them); set it to false and give train_batch "
        "an iterator that shortens the sequences"
    )


def backend_refusal(backend: str) -> str | None:
    """Why slices cannot be sent through a backend; None if they can."""
    if backend in BACKENDS:
        return None
    return (
        f"dist_backend: found {backend!r}, allowed are 'nccl' and 'gloo'; change the backend given "
        "to deepspeed.init_distributed"
    )


def queue_refusal(backend: str, environ: Mapping[str, str]) -> str | None:
    """Why the environment's number of hardware queues would block; None if it would not."""
    if backend != "nccl" or environ.get(_CONNECTIONS) != "1":
        return None
    return (
        f"{_CONNECTIONS}: found 1, allowed is 2 or more (in one queue, a receive that waits would "
        "hold up the computation that its sender needs); change or unset it"
    )


def _value_at(ds_config: Mapping[str, Any], path: str) -> Any:
    value: Any = ds_config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


__all__ = [
    "BACKENDS",
    "backend_refusal",
    "curriculum_refusal",
    "has_sampled_curriculum",
    "queue_refusal",
    "refused_json",
    "refused_settings",
]
