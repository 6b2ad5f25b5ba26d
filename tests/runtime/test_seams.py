"""The private names of DeepSpeed that this package relies on are there, and missed if not."""

from __future__ import annotations

import deepspeed
import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.errors import TeraPipeError
from terapipe_ds.runtime.deepspeed_seams import (
    PIPELINE_ENGINE_SEAMS,
    check_seams,
    pipeline_engine_is,
)


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
