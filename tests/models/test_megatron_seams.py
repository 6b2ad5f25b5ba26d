"""The names of megatron-core that this package stands on are there, and missed if not."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe import moe_layer, moe_utils

from terapipe_ds.errors import TeraPipeError
from terapipe_ds.models import megatron_seams
from terapipe_ds.models.megatron_seams import SEAMS, check_seams, log_auxiliary_loss, put_router


def test_installed_megatron_has_every_name() -> None:
    check_seams()


@pytest.mark.parametrize(("owner", "name"), SEAMS, ids=lambda it: it if isinstance(it, str) else "")
def test_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    *parents, last = name.split(".")
    holder = attrgetter(".".join(parents))(owner) if parents else owner
    # Where the name is defined, not where it is inherited.
    holder = next(base for base in getattr(holder, "__mro__", (holder,)) if last in vars(base))
    monkeypatch.delattr(holder, last)
    with pytest.raises(TeraPipeError) as caught:
        check_seams()
    message = str(caught.value)
    assert f"found version {megatron.core.__version__} without " in message
    assert name in message and "\n" not in message


class MakesItsRouter:
    """As ``MoELayer`` before megatron-core 0.16."""

    def __init__(self, config: str) -> None:
        self.router = moe_layer.TopKRouter(config=config)


def test_routers_of_layers_that_take_none_from_their_spec() -> None:
    stock = moe_layer.TopKRouter
    mlp = SimpleNamespace(module=MakesItsRouter, submodules=SimpleNamespace(experts=None))
    put_router(mlp, lambda config: f"ours, {config}")
    assert mlp.module("configured").router == "ours, configured"
    assert moe_layer.TopKRouter is stock

    def fails(config: str) -> None:
        raise ValueError(config)

    mlp.module = MakesItsRouter
    put_router(mlp, fails)
    with pytest.raises(ValueError, match="configured"):
        mlp.module("configured")
    assert moe_layer.TopKRouter is stock


def test_routers_of_specs() -> None:
    mlp = SimpleNamespace(module=MakesItsRouter, submodules=SimpleNamespace(router=None))
    put_router(mlp, len)
    assert mlp.module is MakesItsRouter and mlp.submodules.router is len


@pytest.mark.parametrize("logs_dp", [True, False])
def test_logged_losses(monkeypatch: pytest.MonkeyPatch, logs_dp: bool) -> None:
    kept: dict[str, Any] = {}
    monkeypatch.setattr(megatron_seams, "_LOGS_DP", logs_dp)
    monkeypatch.setattr(
        moe_utils, "save_to_aux_losses_tracker", lambda *args, **kwargs: kept.update(kwargs)
    )
    log_auxiliary_loss("z_loss", torch.ones(()), 1, 2, group="all", over_replicas=True)
    assert kept == {"reduce_group": "all", **({"reduce_group_has_dp": True} if logs_dp else {})}
