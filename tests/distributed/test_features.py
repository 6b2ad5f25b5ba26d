"""Experts, latent attention, packed documents and megatron's full recomputation, in slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from . import features
from .ranks import run_ranks
from .workers import worst

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("recompute", [False, True])
def test_auxiliary_losses(recompute: bool, folder: Path) -> None:
    run_ranks(features.auxiliary_losses, 2, folder, recompute)


@pytest.mark.parametrize(
    ("function", "world"),
    [
        (features.auxiliary_losses_are_a_mean, 2),
        (features.loss_scale_is_handed_on, 2),
        (features.balance_over_slices, 1),
        (features.packed_documents, 2),
        (features.layer_with_bias, 1),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_feature(function: Callable[[], None], world: int, folder: Path) -> None:
    run_ranks(function, world, folder)


@pytest.mark.skipif(
    not get_accelerator().is_fp16_supported(), reason="this CPU has no fp16 arithmetic"
)
def test_fp16_scales_auxiliary_losses(folder: Path) -> None:
    run_ranks(features.fp16_scales_auxiliary_losses, 2, folder)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"), [("experts", True), ("latent", True), ("latent", False)]
)
def test_tensor_parallel_ranks_have_the_gradients_of_one(
    kind: str, sequence_parallel: bool, folder: Path
) -> None:
    one, other = run_ranks(features.one_rank, 2, folder / "two", kind, sequence_parallel)
    (alone,) = run_ranks(features.one_rank, 1, folder / "one", kind, sequence_parallel)
    assert any("router" in name or "kv_layernorm" in name for name in alone.value)
    for rank in (one, other):
        assert set(rank.value) == set(alone.value)
        gap, name = worst(rank.value, alone.value)
        assert gap <= 2e-5, f"gradient of {name} differs by {gap:.1e}"


@pytest.mark.parametrize(
    ("method", "layers", "twice"),
    [("uniform", 1, {1, 2, 3, 4, 5, 6}), ("block", 2, {1, 2, 4, 5}), ("block", 9, {*range(1, 7)})],
)
def test_full_recompute(method: str, layers: int, twice: set[int], folder: Path) -> None:
    results = run_ranks(features.full_recompute, 2, folder, method, layers)
    runs = {number: count for result in results for number, count in result.value.items()}
    # Three slices; a layer that is recomputed runs twice for each.
    assert runs == {number: 6 if number in twice else 3 for number in range(1, 7)}


def test_ranks_with_tokens_of_their_own_draw_by_themselves(folder: Path) -> None:
    one, other = run_ranks(features.ranks_draw_by_themselves, 2, folder)
    assert 0.1 < sum(one.value) / len(one.value) < 0.5
    assert one.value != other.value
