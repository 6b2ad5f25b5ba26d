"""The paper's tables: which rows are fitted, that the fit finds what is there, and its targets."""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper")


@pytest.fixture
def rows(paper: Any) -> list[Any]:
    return list(paper.paper_rows(json.loads(paper.TABLES.read_text())))


def test_what_is_fitted(rows: list[Any]) -> None:
    """Rows without TeraPipe and setting 8's uniform slices; of repeated rows one."""
    fitted = [row.name for row in rows if row.fitted]
    without = [f"setting {number}, without" for number in range(1, 11)]
    assert fitted == without + [f"setting 8, {count} uniform slices" for count in (4, 8, 16)]
    assert len(rows) == 33
    assert len({(row.setting, row.scheme) for row in rows}) == len(rows)
    # Settings 2 and 3 have the same scheme with TeraPipe and without.
    assert sum("TeraPipe" in row.name for row in rows) == 8 + 3


def test_the_fit_finds_parameters_that_are_there(paper: Any, rows: list[Any]) -> None:
    truth = paper.Cluster(flops=80e12, layer_s=9e-4, tensor=40e9, stage=4e9, replica=0.5e9)
    made = [
        dataclasses.replace(row, measured_s=row.predicted_s(truth)) for row in rows if row.fitted
    ]
    found = paper.fit(made)
    for name, value in paper.parameters(truth).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_a_chip_does_no_more_than_its_peak(paper: Any, rows: list[Any]) -> None:
    truth = paper.Cluster(flops=400e12, layer_s=9e-4, tensor=40e9, stage=4e9, replica=0.5e9)
    made = [
        dataclasses.replace(row, measured_s=row.predicted_s(truth)) for row in rows if row.fitted
    ]
    assert paper.fit(made).flops == pytest.approx(125e12)


def test_targets(paper: Any, rows: list[Any]) -> None:
    """The numbers are the paper's and the model's: nothing here is timed."""
    cluster = paper.fit([row for row in rows if row.fitted])
    errors = [abs(row.error(cluster)) for row in rows if not row.fitted]
    assert statistics.median(errors) <= paper.MEDIAN_LIMIT
    assert max(errors) <= paper.WORST_LIMIT
    tables = json.loads(paper.TABLES.read_text())
    for number in (3, 9):
        found = paper.our_plan(tables["overall"][number - 1], cluster)
        assert found.ours_s <= found.paper_s <= found.without_s
        assert found.zero_bubble_s < found.one_f_one_b_s
        assert found.one_f_one_b_gib <= found.paper_gib


def test_parts_of_a_slice_add_up(paper: Any, rows: list[Any]) -> None:
    cluster = paper.fit([row for row in rows if row.fitted])
    times = paper.StageTimes(cluster, rows[0].setting)
    forward, inputs, weights = times.parts(128, 512)
    assert times.time(128, 512) == pytest.approx(forward + inputs + weights)
    # Two sequences together share what a slice costs whatever its length.
    assert times.time(128, 512, 2) < 2 * times.time(128, 512)
    assert times.time(128, 1024) > times.time(128, 512)
