"""What the engine refuses before it starts: settings whose result could not be exact."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch.distributed
from deepspeed.pipe import PipelineModule

from ..config import TeraPipeConfig
from ..errors import ConfigError
from .adapter import adapter_of
from .deepspeed_seams import gloo_carries_device_tensors, is_dual_pipe, recomputes_on_a_stream
from .loss import choose_loss
from .refuse_settings import (
    curriculum_refusal,
    has_sampled_curriculum,
    queue_refusal,
    refused_settings,
)


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
    if is_dual_pipe(module):
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
    ds_json = ds_config._param_dict
    refused = refused_settings(
        ds_json,
        zero_stage=int(ds_config.zero_optimization_stage),
        fp16=ds_config.float16_config.enabled,
    )
    if training_data is not None and stages > 1 and has_sampled_curriculum(ds_json):
        refused.append(curriculum_refusal(stages))
    if refused:
        raise ConfigError(refused[0])
    backend = torch.distributed.get_backend()
    if backend == "gloo" and not gloo_carries_device_tensors():
        raise ConfigError(
            "dist_backend: found 'gloo' with tensors on a device, allowed is 'nccl' (gloo sends "
            "from host memory alone, DeepSpeed's own messages too); change the backend given to "
            "deepspeed.init_distributed"
        )
    one_queue = queue_refusal(backend, os.environ)
    if one_queue is not None:
        raise ConfigError(one_queue)
    if ds_config.pipeline.get("use_reentrant") is False and recomputes_on_a_stream():
        raise ConfigError(
            f"pipeline.use_reentrant: found false on a CPU with DeepSpeed {deepspeed.__version__}, "
            "allowed is true (before 0.19.8, non-reentrant recomputation opens a stream, which "
            "CPUs lack); change pipeline.use_reentrant, or install 0.19.8"
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
