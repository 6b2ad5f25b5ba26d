"""What megatron's schedules refuse with slices, in one line; what a forward_step may not do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

from . import megatron_lm_refused as workers

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_ranks(workers.refusals, 1, tmp_path_factory.mktemp("refused"))[0].value


@pytest.mark.parametrize("name", workers.REFUSED)
def test_refused_in_one_line(refused: dict[str, str], name: str) -> None:
    _, pattern = workers.REFUSED[name]
    assert re.search(pattern, refused[name]), refused[name]
    assert "\n" not in refused[name]


def test_another_rank_s_refusal_is_raised_on_all(tmp_path: Path) -> None:
    for result in run_ranks(workers.refused_on_one_rank, 2, tmp_path):
        assert re.search(r"^model: found the wrapper Wrapper.*\(found on rank 1\)$", result.value)
