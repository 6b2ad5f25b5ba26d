"""How the parts of a parameter on several tensor-parallel ranks are joined."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from deepspeed.checkpoint import PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
from megatron.core.transformer.mlp import MLP
from torch import nn

from terapipe_ds.models.universal_checkpoint import _kinds


def mlp(*, gated: bool, stride: int) -> MLP:
    """What of megatron's MLP tells how it is cut."""
    made = MLP.__new__(MLP)
    nn.Module.__init__(made)
    made.config = SimpleNamespace(gated_linear_unit=gated)
    made.linear_fc1 = nn.Linear(4, 8)
    for parameter in made.linear_fc1.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0
        parameter.partition_stride = stride
    return made


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_gates_and_values_are_joined_apart(gated: bool, stride: int) -> None:
    """megatron-core 0.15 marks a gated layer as one block of rows, which it is not."""
    found = list(_kinds(nn.Sequential(mlp(gated=gated, stride=stride))))
    names = ("0.linear_fc1.weight", "0.linear_fc1.bias")
    expected = [(PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, name) for name in names]
    assert found == (expected if gated else [])
