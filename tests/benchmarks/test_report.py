"""docs/benchmarks.md from small JSON files."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ABOUT = {
    "command": "python benchmarks/x.py",
    "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 8.0},
    "versions": {"python": "3.11", "torch": "2.13"},
    "date": "2026-01-02",
}


def peer_rows() -> list[dict[str, Any]]:
    made = []
    for stages, count in ((2, 1), (2, 8), (8, 2)):
        for name, is_ours, seconds in (
            ("DeepSpeed", False, 0.2),
            ("terapipe-ds 1f1b", True, 0.1 if count < 8 else 0.3),
        ):
            row = {
                "stages": stages,
                "seq_length": 64,
                "micro_batches": count,
                "name": name,
                "is_ours": is_ours,
                "runs": "1F1B",
                "seconds": [seconds] * 3,
            }
            if stages == 2:
                row["hidden"] = 96
            if is_ours:
                row["slices"] = "[32, 32]"
            made.append(row)
    refused = {**made[0], "name": "torch ZBV", "seconds": [], "refused": "too few"}
    return [made[0], refused, *made[1:]]


RESULTS: dict[str, Any] = {
    "paper": {
        "parameters": {
            "flops": 1e14,
            "layer_s": 1e-4,
            "tensor": 1e10,
            "stage": 2e9,
            "replica": 1e9,
            "memory": 7e11,
        },
        "rows": [
            {"row": "one", "fitted": True, "paper_s": 1.0, "predicted_s": 1.1, "error": 0.1},
            {"row": "two", "fitted": False, "paper_s": 2.0, "predicted_s": 1.5, "error": -0.25},
        ],
        "held_out": {"rows": 1, "median_error": 0.25, "worst_error": 0.25},
        "planned": [
            {
                "setting": 7,
                "without_s": 3.0,
                "paper_s": 2.0,
                "ours_s": 1.5,
                "scheme": "[(1, [64])]",
                "one_f_one_b_s": 1.4,
                "zero_bubble_s": 1.3,
                "paper_gib": 12.0,
                "one_f_one_b_gib": 8.0,
                "zero_bubble_gib": 9.0,
            }
        ],
    },
    "peers": {"rows": peer_rows()},
    "scaling": {
        "series": {"slices": [{"x": 2**k, "engine_us": 100.0 * 2**k} for k in range(3)]},
        "growth": [
            {
                "series": "slices",
                "measure": "engine_us",
                "exponent": 1.0,
                "last": 1.0,
                "allowed": 0.1,
                "why": "it must not",
                "flagged": True,
            }
        ],
    },
    "emulate": {
        "engine_us": 250.0,
        "rows": [
            {
                "stages": 8,
                "schedule": "1f1b",
                "slices": [1024, 512, 512],
                "measured_ms": 102.0,
                "simulated_ms": 100.0,
                "speedup": 2.0,
                "simulated_speedup": 2.1,
            }
        ],
    },
}
# What each section must say.
LINES = {
    "paper": [
        "| two | predicted | 2.000 | 1.500 | -25.0% |",
        "| 7 | 3.000 | 2.000 | 1.500 | 1.400 | 1.300 | 12.0 | 8.0 | 9.0 |",
    ],
    "peers": [
        "### 2 stages, 64 tokens, width 96",
        "### 8 stages, 64 tokens",
        "| DeepSpeed | 200 (200 - 200), 2.00x | **200 (200 - 200), 1.00x** |",
        "| terapipe-ds 1f1b | **100 (100 - 100), 1.00x** | 300 (300 - 300), 1.50x |",
        "Slices: terapipe-ds 1f1b with 1: 2 of 32; terapipe-ds 1f1b with 8: 2 of 32.",
        "- 2 stages, 64 tokens, 8 micro-batches: DeepSpeed by 50.0% over terapipe-ds 1f1b in "
        "slices of [32, 32]",
        "- faster than every peer at 1 and 2 micro-batches: met",
        "- at most 3% slower than the best at 8: missed",
    ],
    "scaling": [
        "| slices | `engine_us` | 1.00 | 1.00 | 0.10: it must not | **too fast** |",
        "| 4 | 400 us |",
    ],
    "emulate": ["| 8 | 1f1b | planned, 3 | 102 | 100 | +2.0% | 2.00x | 2.10x |"],
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("report")


def write(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps({**ABOUT, "results": RESULTS[name]}))


@pytest.mark.parametrize(
    "names", [tuple(RESULTS), ("paper",), ("peers", "emulate"), ("scaling",)], ids=str
)
def test_sections_of_what_is_there(report: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    write(tmp_path / "results", *names)
    out = tmp_path / "docs" / "benchmarks.md"
    assert report.main(["--results", str(tmp_path / "results"), "--out", str(out)]) == 0
    lines = out.read_text().splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == [f"## {report.SECTIONS[name][0]}" for name in RESULTS if name in names]
    for name, expected in LINES.items():
        for line in expected:
            assert (line in lines) == (name in names), line
    measured = [line for line in lines if line.startswith("`python benchmarks/x.py`")]
    assert measured == [
        "`python benchmarks/x.py`, 2026-01-02, on 2 cores (a processor) with 8 GiB; python 3.11, "
        "torch 2.13."
    ] * len(names)
    pictures = {path.name for path in out.parent.glob("*.png")}
    if find_spec("matplotlib") is not None:
        assert pictures == {f"benchmarks-{name}.png" for name in names if name != "emulate"}
    for picture in pictures:
        assert any(line.endswith(f"]({picture})") for line in lines)


def test_an_engine_that_never_ran_is_left_out(report: Any, tmp_path: Path) -> None:
    write(tmp_path, "peers")
    assert not any("torch ZBV" in line for line in report.report(tmp_path, tmp_path / "x.md"))


def test_without_matplotlib_the_text_is_written(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    write(tmp_path, "paper")
    out = tmp_path / "benchmarks.md"
    assert report.main(["--results", str(tmp_path), "--out", str(out)]) == 0
    assert "![" not in out.read_text() and not list(tmp_path.glob("*.png"))
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "results: found none in"),
        ("{", "peers.json: found no JSON"),
        ("[]", "peers.json: found no command, machine, versions, date, results"),
        ('{"rows": []}', "peers.json: found no command"),
    ],
)
def test_bad_input_is_one_line(
    report: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / "peers.json").write_text(content)
    out = tmp_path / "benchmarks.md"
    assert report.main(["--results", str(tmp_path), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not out.exists()
