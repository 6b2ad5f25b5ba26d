"""Of the benchmark of growth: exponents and flags; and what a JSON file says of itself."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scaling")


@pytest.fixture
def about(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("about")


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, -0.5])
def test_exponent_of_a_power(scaling: Any, power: float) -> None:
    xs = [1, 2, 4, 8, 32]
    assert scaling.exponent(xs, [3 * x**power for x in xs]) == pytest.approx(power)


def test_exponent_is_the_best_line(scaling: Any) -> None:
    # In powers of two: (0, 0), (1, 2), (2, 1); least squares gives a slope of 1/2.
    assert scaling.exponent([1, 2, 4], [1, 4, 2]) == pytest.approx(0.5)


def test_of_several_stages_the_largest_counts(scaling: Any) -> None:
    points = [{"x": 1, "m": [0, 0]}, {"x": 2, "m": [3, 5]}, {"x": 4, "m": [7, 6]}]
    assert scaling.values(points, "m") == ([2, 4], [5, 7])


def growth_of(scaling: Any, series: str, measure: str, numbers: list[float]) -> Any:
    points = [{"x": 2**k, measure: number} for k, number in enumerate(numbers)]
    (found,) = scaling.grown({series: points})
    return found


def test_what_grows_too_fast_is_flagged(scaling: Any) -> None:
    constant = growth_of(scaling, "slices", "engine_us", [900, 200, 201, 199, 200])
    # The first one, where what a step costs once shows, does not count.
    assert constant.exponent == pytest.approx(0, abs=0.01) and not constant.flagged
    linear = growth_of(scaling, "slices", "engine_us", [100, 200, 400, 800, 1600])
    assert linear.exponent == pytest.approx(1) and linear.flagged
    assert linear.allowed == pytest.approx(0.1)
    late = growth_of(scaling, "micro-batches", "activation_bytes", [100] * 40 + [115])
    assert late.exponent < 0.05 < late.last and late.flagged


def test_growth_without_a_rule_is_told_only(scaling: Any) -> None:
    found = growth_of(scaling, "slices", "step_s", [1, 4, 16, 64])
    assert found.exponent == pytest.approx(2) and found.allowed is None and not found.flagged


def test_rules_are_for_what_is_measured(scaling: Any) -> None:
    assert {rule.series for rule in scaling.RULES} == set(scaling.X)
    for rule in scaling.RULES:
        assert f'"{rule.measure}"' in (BENCHMARKS / "scaling.py").read_text().split("# Ranks")[1]


def test_summary(scaling: Any) -> None:
    series = {
        "sequence": [{"x": 2**k, "seconds": [1], "kv_bytes": [4**k * 2**20]} for k in range(3)]
    }
    growths = [vars(growth) for growth in scaling.grown(series)]
    lines = scaling.summary(series, growths)
    assert any("16.00 MiB" in line for line in lines)
    (flagged,) = [line for line in lines if "TOO FAST" in line]
    assert "kv_bytes" in flagged and "2.00" in flagged and "1.05" in flagged
    assert not any("seconds" in line for line in lines)


def test_numbers_have_units(scaling: Any) -> None:
    written = [
        scaling.written(*given)
        for given in (("kv_bytes", 2**19), ("rank_gib", 0.5), ("engine_us", 12.3), ("step_s", 1.5))
    ]
    assert written == ["0.50 MiB", "512 MiB", "12 us", "1.500 s"]


def test_a_command_without_its_output(about: Any) -> None:
    argv = [
        "/somewhere/peers.py",
        "--local_rank=1",
        "--rounds",
        "3",
        "--json",
        "/a/file",
        "--emulated",
    ]
    assert about.command(argv) == "python benchmarks/peers.py --rounds 3 --emulated"
    assert about.command(["peers.py", "--json=x"]) == "python benchmarks/peers.py"


def test_results_say_where_they_are_from(
    about: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/scaling.py", "--json", str(tmp_path / "x")])
    about.write_results(tmp_path / "x", {"rows": []})
    content = json.loads((tmp_path / "x").read_text())
    assert list(content) == ["command", "machine", "versions", "date", "results"]
    assert content["command"] == "python benchmarks/scaling.py"
    assert set(content["machine"]) == {"cpu", "cores", "memory_gib"}
    packages = {"python", "torch", "deepspeed", "megatron-core", "terapipe-ds"}
    assert set(content["versions"]) == packages
    assert str(tmp_path) not in (tmp_path / "x").read_text()
