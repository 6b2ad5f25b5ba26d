"""What DeepSpeed must know of a model to convert its checkpoints to universal ones.

``deepspeed/checkpoint/ds_to_universal.py`` (read from 0.19.8) joins each parameter from what the
tensor-parallel ranks hold of it. How, and which parameters several stages keep a copy of, it reads
from patterns that the checkpoint carries, and ``DeepSpeedEngine.save_checkpoint`` takes them from
the module's attribute of this name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed
from deepspeed.checkpoint import (
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.pipe import PipelineModule
from megatron.core.transformer.mlp import MLP
from torch import nn

_TIED = r"tied_modules\."
"""``PipelineModule`` keeps tied layers under this name; the first stage has all of their parts.

Of what this matches the converter takes the first stage's alone; its processes would else write the
copies of several stages to one file.
"""


def describe_parameters(module: PipelineModule) -> None:
    """Lets checkpoints of a pipeline of megatron-core layers be converted to universal ones.

    All ranks of a pipeline call it together: the converter reads the first stage's patterns alone,
    so they must tell of all stages' parameters.

    Args:
        module: this rank's stage, with the marks that megatron-core's layers put on parameters
            (``tensor_model_parallel``, ``partition_dim``).
    """
    grid = module.mpu()
    stages: list[dict[str, set[str]]] = [{}] * grid.get_pipe_parallel_world_size()
    torch.distributed.all_gather_object(
        stages, _patterns(module), group=grid.get_pipe_parallel_group()
    )
    info = {
        kind: sorted(set().union(*(stage.get(kind, set()) for stage in stages)))
        for kind in sorted(set().union(*stages))
    }
    info[PIPELINE_REPLICATED_PARAMETER_PATTERNS] = [_TIED]
    info[UNIVERSAL_CHECKPOINT_VERSION_KEY] = UNIVERSAL_CHECKPOINT_VERSION_VALUE
    setattr(module, UNIVERSAL_CHECKPOINT_INFO, info)


def _patterns(module: nn.Module) -> dict[str, set[str]]:
    """One pattern for the same parameter of all layers, by how ranks' parts of it are joined."""
    found: dict[str, set[str]] = {}
    for kind, name in _kinds(module):
        # The converter tries every pattern on every parameter, so layers share theirs.
        parts = (r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
        found.setdefault(kind, set()).add(r"\.".join(parts) + "$")
    return found


def _kinds(module: nn.Module) -> Iterator[tuple[str, str]]:
    gated = _gated(module)
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            yield TP_REPLICATED_PARAMETER_PATTERNS, name
        elif parameter.partition_dim == 1:
            yield PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, name
        elif parameter in gated:
            yield PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, name
        # All others are joined along their first dimension, which needs no pattern.


def _gated(module: nn.Module) -> set[nn.Parameter]:
    """Those of which each rank holds its rows of a gate above its rows of the values.

    megatron-core marks them by ``partition_stride`` since 0.16.
    """
    return {
        parameter
        for mlp in module.modules()
        if isinstance(mlp, MLP) and mlp.config.gated_linear_unit
        for parameter in mlp.linear_fc1.parameters()
    }
