"""A script with megatron's seams, unedited: sliced equals stock, and every seam is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import free_port, run_ranks

from . import workers

pytestmark = pytest.mark.distributed

TOLERANCE = 2e-6
SCRIPT = Path(__file__).parent / "standin" / "train.py"


def gap(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of losses and evaluation."""
    pairs = zip(
        [*found["losses"], found["evaluation"]],
        [*expected["losses"], expected["evaluation"]],
        strict=True,
    )
    return max(abs(one - other) / abs(other) for one, other in pairs)


def assert_sliced_equals(sliced: dict[str, Any], stock: dict[str, Any]) -> None:
    assert (sliced["engine"], stock["engine"]) == ("TokenSliceEngine", "PipelineEngine")
    assert gap(sliced, stock) <= TOLERANCE


@pytest.fixture(scope="module")
def stock(
    tmp_path_factory: pytest.TempPathFactory, extensions_built: None
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stock")
    return run_ranks(workers.stock_and_checkpoints, 2, folder, folder)[0].value


def test_unedited_under_the_launcher(stock: Any, folder: Path) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    config = workers.write_config(folder)
    result = subprocess.run(
        [
            *(str(launcher), "--num_gpus=2", f"--master_port={free_port()}"),
            *("--module", "terapipe_ds.run", str(SCRIPT)),
            *("--train-iters", "5", "--deepspeed_config", config),
        ],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    printed = re.search(r"^results: (.*)$", result.stdout, re.MULTILINE)
    assert printed is not None, result.stdout
    assert_sliced_equals(json.loads(printed[1]), stock["stock"])


@pytest.mark.parametrize("kind", ["sliced from stock", "stock from sliced"])
def test_checkpoints_load_in_the_other(stock: Any, kind: str) -> None:
    whole, continued = stock["stock"], stock[kind]
    assert continued["engine"].startswith("TokenSlice") == kind.startswith("sliced")
    assert gap(continued, {**whole, "losses": whole["losses"][3:]}) <= TOLERANCE


def test_variants(folder: Path) -> None:
    found = run_ranks(workers.variants, 2, folder, folder)[0].value
    for stock, sliced in found.values():
        assert_sliced_equals(sliced, stock)


def test_a_loss_of_another_kind_is_taken_whole(folder: Path) -> None:
    stock, sliced = run_ranks(workers.whole_sequence_for_another_loss, 2, folder, folder)[0].value
    assert_sliced_equals(sliced, stock)


def test_plans_leave_no_trace(folder: Path) -> None:
    run_ranks(workers.auto_leaves_no_trace, 2, folder, folder)


@pytest.fixture(scope="module")
def broken(
    tmp_path_factory: pytest.TempPathFactory, extensions_built: None
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("broken")
    return run_ranks(workers.silent, 2, folder, folder)[0].value


@pytest.mark.parametrize("seam", workers.SILENT)
def test_a_broken_seam_gives_other_losses(stock: Any, broken: Any, seam: str) -> None:
    whole = stock["stock"]
    first = {**whole, "losses": whole["losses"][: len(broken[seam]["losses"])]}
    found = {**broken[seam], "evaluation": first["evaluation"]}
    assert gap(found, first) > 100 * TOLERANCE


@pytest.mark.parametrize("seam", workers.LOUD)
def test_a_broken_seam_fails(folder: Path, seam: str) -> None:
    results = run_ranks(workers.loud, 2, folder, folder, seam, expect_success=False, timeout=60)
    assert all(result.exit_code for result in results)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, extensions_built: None) -> list[Any]:
    folder = tmp_path_factory.mktemp("refused")
    return [result.value for result in run_ranks(workers.refusals, 2, folder, folder)]


@pytest.mark.parametrize("name", workers.REFUSED)
def test_refused_on_every_rank_in_one_line(refused: Any, name: str) -> None:
    _, pattern = workers.REFUSED[name]
    for rank in refused:
        assert re.search(pattern, rank[name]), rank.get(name)
        assert "\n" not in rank[name]
