"""What the engine refuses before it starts: settings whose result could not be exact."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

from ..config import TeraPipeConfig
from ..errors import ConfigError
from .adapter import adapter_of
from .deepspeed_seams import ZeroStageEnum, gloo_carries_device_tensors
from .loss import choose_loss

# Switches of DeepSpeed's JSON that would be ignored or go wrong in slices, and why.
_REFUSED_FEATURES = (
    ("progressive_layer_drop.enabled", "every slice of a sequence must go through the same layers"),
    ("data_efficiency.data_routing.random_ltd.enabled", "it drops tokens within a slice"),
    ("compile.deepcompile", "compiled code would be specialised on one slice"),
    ("flops_profiler.enabled", "it would profile one slice for a micro-batch"),
)


def _switched_on(ds_config: dict[str, Any], path: str) -> bool:
    value: Any = ds_config
    for key in path.split("."):
        value = value.get(key, False) if isinstance(value, dict) else False
    return value is True


_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning.enabled"


def check_supported(
    block: TeraPipeConfig, module: PipelineModule, ds_config: Any, training_data: Any = None
) -> None:
    """Raises for what cannot be sliced correctly.

    Args:
        block: the ``"terapipe"`` block.
        module: this rank's stages.
        ds_config: the ``DeepSpeedConfig``.
        training_data: the data set given to ``initialize``, if any.

    Raises:
        ConfigError: names the setting to change.
    """
    if isinstance(module, DualPipeVModule):
        raise ConfigError(
            "model: found a DualPipeVModule, allowed is a PipelineModule (DualPipeV has a schedule "
            'of its own); change the model, or set "terapipe": {"enabled": false}'
        )
    layers, stages = len(module._layer_specs), module.num_pipeline_stages()
    if layers < stages:
        raise ConfigError(
            f"num_stages: found {stages} stages for {layers} pipeline layers, allowed is at most "
            "one stage a layer; lower num_stages, or give the model more layers"
        )
    if ds_config.zero_optimization_stage > ZeroStageEnum.optimizer_states:
        raise ConfigError(
            f"zero_optimization.stage: found {int(ds_config.zero_optimization_stage)}, allowed are "
            "0 and 1 (pipeline parallelism keeps whole gradients on a stage); change "
            "zero_optimization.stage"
        )
    if ds_config.float16_config.enabled and not ds_config.zero_optimization_stage:
        raise ConfigError(
            "zero_optimization.stage: found 0 with fp16, allowed is 1 (without ZeRO, DeepSpeed "
            "0.19.8 divides gradients by a loss scale that the loss was not multiplied with); set "
            "zero_optimization.stage to 1, or use bf16"
        )
    for path, reason in _REFUSED_FEATURES:
        if _switched_on(ds_config._param_dict, path):
            raise ConfigError(
                f"{path}: found true, allowed is false with token slices ({reason}); switch it off"
            )
    if (
        training_data is not None
        and stages > 1
        and _switched_on(ds_config._param_dict, _CURRICULUM)
    ):
        raise ConfigError(
            f"{_CURRICULUM}: found true with training_data and {stages} stages, allowed is one "
            "stage (DeepSpeed 0.19.8's sampler sends every stage's replicas the first rank's "
            "choice, and only the first stage's have that rank among them); set it to false and "
            "give train_batch an iterator that shortens the sequences"
        )
    backend = torch.distributed.get_backend()
    if backend == "gloo" and not gloo_carries_device_tensors():
        raise ConfigError(
            "dist_backend: found 'gloo' with tensors on a device, allowed is 'nccl' (gloo sends "
            "from host memory alone, DeepSpeed's own messages too); change the backend given to "
            "deepspeed.init_distributed"
        )
    if backend == "nccl" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS: found 1, allowed is 2 or more (in one queue, a receive "
            "that waits would hold up the computation that its sender needs); change or unset it"
        )
    if module.loss_fn is None:
        raise ConfigError(
            "model: found a PipelineModule without loss_fn, allowed is one with loss_fn(outputs, "
            "labels), since a loss inside the last layer cannot be cut; pass loss_fn"
        )
    choose_loss(block.loss, adapter_of(module))
    check_module(module)


def check_module(module: PipelineModule) -> None:
    """Raises for what the module's own adapter refuses.

    Raises:
        ConfigError: names the setting to change.
    """
    check = adapter_of(module).check
    if check is not None:
        check(module)
