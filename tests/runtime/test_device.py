"""A rank's device is the current one before anything is allocated or exchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from terapipe_ds.models import gpt
from terapipe_ds.runtime import device, launch


class Reached(Exception):
    """Raised in place of taking the device."""


def reached() -> None:
    raise Reached


def test_takes_the_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(device, "get_accelerator", lambda: SimpleNamespace(set_device=taken.append))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    device.use_own_device()
    assert taken == []
    monkeypatch.setenv("LOCAL_RANK", "3")
    device.use_own_device()
    assert taken == [3]


def test_initialize_takes_it_before_settings_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(launch, "use_own_device", reached)
    with pytest.raises(Reached):
        launch.initialize(model=None, config={})


def test_gpt_pipeline_takes_it_before_layers_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "use_own_device", reached)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    with pytest.raises(Reached):
        gpt.gpt_pipeline(config, vocab_size=8, seq_length=8, num_stages=1)
