"""megatron-core's own schedules, stock and sliced: equal losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

from . import megatron_lm_workers as workers
from .megatron_lm import Setting

pytestmark = pytest.mark.distributed

SETTINGS: dict[int, dict[str, Setting]] = {
    1: {
        "one micro-batch": Setting(micro_batches=1),
        "three": Setting(),
    },
    2: {
        "one micro-batch": Setting(pipe=2, micro_batches=1),
        "three": Setting(pipe=2),
        "gpipe": Setting(pipe=2, schedule="gpipe"),
    },
    4: {
        "one micro-batch": Setting(pipe=4, micro_batches=1),
        "three": Setting(pipe=4),
        "labels": Setting(pipe=4, labels=True),
    },
}


@pytest.mark.parametrize("world", SETTINGS)
def test_equals_stock(world: int, tmp_path: Path) -> None:
    settings = SETTINGS[world]
    for result in run_ranks(workers.compared, world, tmp_path, settings):
        for name, gaps in result.value.items():
            assert max(gaps.values()) <= settings[name].tolerance, (result.rank, name, gaps)


def test_dropping_the_context_gradient_is_seen(tmp_path: Path) -> None:
    (result,) = run_ranks(workers.without_context_gradients, 1, tmp_path, Setting())
    assert result.value["gradients"] > 1e-3
