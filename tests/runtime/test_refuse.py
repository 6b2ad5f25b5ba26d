"""Settings of DeepSpeed that the engine refuses before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule

from terapipe_ds import SequenceAdapter, TensorDims
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.errors import ConfigError
from terapipe_ds.runtime import refuse
from terapipe_ds.runtime.refuse import check_supported

BLOCK = TeraPipeConfig(slices=4)
TOKEN = TensorDims(batch=0, sequence=1)


def module(kind: type = PipelineModule, **attributes: Any) -> Any:
    """A pipeline module without layers or ranks: what the checks look at, and nothing else."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made._layer_specs = [None, None]
    made._topo = SimpleNamespace(get_dim=lambda axis: 2)
    made.loss_fn = torch.nn.functional.mse_loss
    made.token_slice_adapter = SequenceAdapter((TOKEN,), (TOKEN,), (TOKEN,), TOKEN)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def ds_config(zero_stage: int = 0, fp16: bool = False, **block: Any) -> Any:
    return SimpleNamespace(
        zero_optimization_stage=zero_stage,
        float16_config=SimpleNamespace(enabled=fp16),
        pipeline=block.get("pipeline", {}),
        _param_dict=block,
    )


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")


def test_an_ordinary_setting_passes() -> None:
    check_supported(BLOCK, module(), ds_config(zero_stage=1, progressive_layer_drop={}))


@pytest.mark.parametrize(
    ("made", "config", "message"),
    [
        (module(_layer_specs=[None]), ds_config(), "found 2 stages for 1 pipeline layers"),
        (module(loss_fn=None), ds_config(), "found a PipelineModule without loss_fn"),
        (module(token_slice_adapter=None), ds_config(), "without an adapter"),
        (module(), ds_config(zero_stage=3), r"zero_optimization\.stage: found 3"),
        (module(), ds_config(fp16=True), r"zero_optimization\.stage: found 0 with fp16"),
        *(
            (module(), ds_config(**block), rf"^{path}: found true, allowed is false")
            for path, block in (
                (r"progressive_layer_drop\.enabled", {"progressive_layer_drop": {"enabled": True}}),
                (
                    r"data_efficiency\.data_routing\.random_ltd\.enabled",
                    {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
                ),
                (r"compile\.deepcompile", {"compile": {"deepcompile": True}}),
                (r"flops_profiler\.enabled", {"flops_profiler": {"enabled": True}}),
            )
        ),
    ],
)
def test_refused(made: Any, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_supported(BLOCK, made, config)


def test_a_pipeline_with_a_schedule_of_its_own_is_refused() -> None:
    dualpipev = pytest.importorskip(
        "deepspeed.runtime.pipe.dualpipev", reason="since DeepSpeed 0.19"
    )
    with pytest.raises(ConfigError, match="found a DualPipeVModule"):
        check_supported(BLOCK, module(dualpipev.DualPipeVModule), ds_config())


CURRICULUM = {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}


def test_the_sampler_of_a_curriculum_is_refused_on_several_stages() -> None:
    check_supported(BLOCK, module(), ds_config(**CURRICULUM))
    check_supported(BLOCK, module(), ds_config(), training_data=[])
    one_stage = module(_topo=SimpleNamespace(get_dim=lambda axis: 1))
    check_supported(BLOCK, one_stage, ds_config(**CURRICULUM), training_data=[])
    message = r"curriculum_learning\.enabled: found true with training_data and 2 stages"
    with pytest.raises(ConfigError, match=message):
        check_supported(BLOCK, module(), ds_config(**CURRICULUM), training_data=[])


def test_one_hardware_queue_is_refused_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_supported(BLOCK, module(), ds_config())
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS: found 1"):
        check_supported(BLOCK, module(), ds_config())


def test_recomputation_that_opens_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.19.8")
    config = ds_config(pipeline={"use_reentrant": False})
    check_supported(BLOCK, module(), config)
    monkeypatch.setattr(deepspeed, "__version__", "0.19.7")
    check_supported(BLOCK, module(), ds_config())
    with pytest.raises(ConfigError, match=r"use_reentrant: found false on a CPU with .* 0\.19\.7"):
        check_supported(BLOCK, module(), config)


def test_gloo_is_refused_where_it_cannot_reach_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuse, "gloo_carries_device_tensors", lambda: False)
    with pytest.raises(ConfigError, match="dist_backend: found 'gloo' with tensors on a device"):
        check_supported(BLOCK, module(), ds_config())
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    check_supported(BLOCK, module(), ds_config())
