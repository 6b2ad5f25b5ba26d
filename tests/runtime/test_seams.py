"""The private names of DeepSpeed that this package relies on are there, and missed if not."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.errors import TeraPipeError
from terapipe_ds.runtime import deepspeed_seams
from terapipe_ds.runtime.deepspeed_seams import (
    PIPELINE_ENGINE_SEAMS,
    check_seams,
    gloo_carries_device_tensors,
    let_gloo_carry_device_tensors,
    own_schedule,
    pipeline_engine_is,
    recomputes_reentrantly,
)
from terapipe_ds.versions import TESTED, Range, outside

ds_comm = importlib.import_module("deepspeed.comm.torch")

# What an older one lacks is skipped; what the newest has lost is a failure.
NEWEST = Range(TESTED["deepspeed"].newest, TESTED["deepspeed"].newest)
IS_OLDER = outside(deepspeed.__version__, NEWEST)


class Engine(PipelineEngine):
    """Stands for the token-slice engine."""


def test_installed_deepspeed_has_every_name() -> None:
    check_seams()


@pytest.mark.parametrize(
    ("owner", "name"),
    [*PIPELINE_ENGINE_SEAMS, (deepspeed, "PipelineEngine")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    if not hasattr(owner, name):
        assert IS_OLDER, f"the newest DeepSpeed has lost {name}"
        pytest.skip(f"DeepSpeed {deepspeed.__version__} makes its schedules inside")
    monkeypatch.delattr(owner, name)
    with pytest.raises(TeraPipeError) as caught:
        check_seams()
    message = str(caught.value)
    assert f"found version {deepspeed.__version__} without {owner.__name__}.{name}, " in message
    assert "\n" not in message


def test_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PipelineEngine, "_next_batch")
    monkeypatch.delattr(PipelineEngine, "_exec_schedule")
    with pytest.raises(
        TeraPipeError, match=r"without PipelineEngine\._exec_schedule, PipelineEngine\._next_batch"
    ):
        check_seams()


def test_engine_is_replaced_inside_only() -> None:
    with pipeline_engine_is(Engine):
        assert deepspeed.PipelineEngine is Engine
    assert deepspeed.PipelineEngine is PipelineEngine


def test_engine_is_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), pipeline_engine_is(Engine):
        raise KeyError
    assert deepspeed.PipelineEngine is PipelineEngine


def test_initialize_looks_the_engine_up_when_called() -> None:
    """What ``pipeline_engine_is`` relies on: a name in the module's namespace."""
    assert "PipelineEngine" in deepspeed.initialize.__code__.co_names
    with pipeline_engine_is(Engine):
        assert deepspeed.initialize.__globals__["PipelineEngine"] is Engine


def test_schedules_that_deepspeed_makes_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed 0.19.4 does; whether it does is read from its code."""

    def train_batch(self: Any) -> Any:
        return schedule.TrainSchedule(micro_batches=3, stages=2, stage_id=1)

    monkeypatch.delattr(PipelineEngine, "_train_schedule", raising=False)
    monkeypatch.setattr(PipelineEngine, "train_batch", train_batch)
    check_seams()
    engine = SimpleNamespace(
        _train_schedule=lambda: "train", _inference_schedule=lambda n: f"{n} to evaluate"
    )
    assert own_schedule(engine, train_batch(None)) == "train"
    stock = schedule.InferenceSchedule(micro_batches=3, stages=2, stage_id=1)
    assert own_schedule(engine, stock) == "3 to evaluate"
    assert own_schedule(engine, "our own") == "our own"


@pytest.mark.parametrize(
    ("interval", "function", "expected"),
    [
        (0, checkpointing.checkpoint, False),
        (1, checkpointing.checkpoint, True),
        (1, checkpointing.non_reentrant_checkpoint, False),
    ],
)
def test_what_recomputes_reentrantly(interval: int, function: Any, expected: bool) -> None:
    module = SimpleNamespace(
        activation_checkpoint_interval=interval, activation_checkpoint_func=function
    )
    assert recomputes_reentrantly(module) is expected
    stock = getattr(PipelineEngine, "_reentrant_activation_checkpointing", None)
    if stock is not None:
        assert stock(SimpleNamespace(module=module)) is expected


def test_a_deepspeed_that_stages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed 0.19.4."""
    monkeypatch.setattr(deepspeed_seams, "_STAGES_ON_HOST", False)
    assert gloo_carries_device_tensors()
    monkeypatch.setattr(deepspeed_seams, "get_accelerator", OnMeta)
    assert not gloo_carries_device_tensors()
    with pytest.raises(TeraPipeError, match="which sends no device tensors over gloo, allowed is"):
        let_gloo_carry_device_tensors()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What DeepSpeed's stages send to each other, where gloo carries device tensors."""
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor, *_: Any) -> None:
        sent.append(tensor)

    def recv(tensor: torch.Tensor, *_: Any) -> None:
        tensor.copy_(sent.pop(0))

    monkeypatch.setattr(p2p, "send", send)
    monkeypatch.setattr(p2p, "recv", recv)
    if not hasattr(ds_comm, "_needs_cpu_staging"):
        assert IS_OLDER, "the newest DeepSpeed has lost _needs_cpu_staging"
        pytest.skip(f"DeepSpeed {deepspeed.__version__} stages nothing on the host")
    monkeypatch.setattr(ds_comm, "_needs_cpu_staging", ds_comm._needs_cpu_staging)
    let_gloo_carry_device_tensors()
    return sent


def test_stages_send_copies_on_the_host(wire: list[torch.Tensor]) -> None:
    weight = torch.ones(3, requires_grad=True)
    output = 2 * weight
    p2p.send(output, 1)
    assert wire[0].data_ptr() != output.data_ptr() and not wire[0].requires_grad
    assert output._version == 0, "autograd would take it for a change"
    found = torch.zeros(3, requires_grad=True)
    p2p.recv(found, 0)
    assert found.tolist() == [2.0] * 3
    meta = torch.empty(3, device="meta")
    p2p.send(torch.ones(3), 1)
    p2p.recv(meta, 0)


def test_copies_are_made_once(wire: list[torch.Tensor]) -> None:
    send, recv = p2p.send, p2p.recv
    let_gloo_carry_device_tensors()
    assert (p2p.send, p2p.recv) == (send, recv)


def test_deepspeed_stages_what_is_on_a_device(wire: list[torch.Tensor]) -> None:
    """The name that is replaced decides for every collective."""
    backend = ds_comm.TorchBackend.__new__(ds_comm.TorchBackend)
    given: list[torch.Tensor] = []

    def take(self: Any, tensor: torch.Tensor) -> None:
        given.append(tensor)

    staged = ds_comm.stage_on_cpu(copy_to_cpu=False, copy_from_cpu=False)(take)
    staged(backend, torch.empty(2, device="meta"))
    staged(backend, torch.empty(2))
    assert [tensor.device.type for tensor in given] == ["cpu", "cpu"]


def test_gloo_alone_does_not_carry_device_tensors(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    assert gloo_carries_device_tensors()
    monkeypatch.setattr(deepspeed_seams, "get_accelerator", OnMeta)
    assert not gloo_carries_device_tensors()
    request.getfixturevalue("wire")
    assert gloo_carries_device_tensors()


class OnMeta:
    """An accelerator whose tensors are not on the host."""

    def device_name(self) -> str:
        return "meta"

    def current_device_name(self) -> str:
        return "meta"
