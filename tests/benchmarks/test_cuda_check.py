"""The CUDA check on a CPU, made small: what it prints and writes, and what it catches."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks

from .cuda_check_ranks import BENCHMARKS, lines_of

PARTS = ["gradients", "attention", "recompute", "lifetime", "memory", "trace"]

# Stands for a rank: each part ends in its own way.
FAKE_RANK = """
import json, os, sys, time
parts, folder = sys.argv[4].split(","), sys.argv[6]
rank = os.environ["RANK"]
records = open(f"{folder}/rank{rank}.records", "a", buffering=1)

def write(**record):
    records.write(json.dumps(record) + "\\n")

for part in parts:
    write(begins=part)
    if part == "attention" and rank == "1":
        write(error="RuntimeError: no such kernel", at=time.time())
        os._exit(1)
    if part == "attention":
        time.sleep(60)
    if part == "recompute":
        time.sleep(60)
    if part == "lifetime" and rank == "0":
        print("about to die")
        os.kill(os.getpid(), 9)
    difference = None if part == "memory" else 0.5
    ok = part != "memory"
    write(lines=[{"what": "it", "difference": difference, "limit": 1.0, "ok": ok}])
"""


@pytest.fixture
def cuda_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cuda_check")


@pytest.mark.distributed
def test_all_parts_on_a_cpu(tmp_path: Path, extensions_built: None) -> None:
    written = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "cuda_check.py")),
            *("--device", "cpu", "--json", str(written)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all ok")
    result = json.loads(written.read_text())
    assert result["ok"] and list(result["seconds"]) == PARTS
    assert result["machine"]["torch"] == f"torch {torch.__version__}"
    assert list(dict.fromkeys(line["part"] for line in result["lines"])) == PARTS
    for line in result["lines"]:
        assert line["ok"] and line["difference"] <= line["limit"], line
        assert f"{line['part']}: {line['what']}, " in done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("part", "fault", "caught"),
    [
        ("gradients", "dropped_gradients", "float64, float32, bfloat16"),
        ("attention", "top_left", "float32, bfloat16"),
        ("recompute", "other_draws", "reentrant, 1f1b"),
        ("lifetime", "read_too_early", "1f1b, step 0"),
        ("lifetime", "overwritten_too_early", "1f1b, step 0"),
        ("memory", "kept_context", "bytes in use after 5 steps of training, K and V buffers"),
        ("trace", "wrong_clock", "exceed the host's"),
    ],
)
def test_a_planted_fault_is_caught(folder: Path, part: str, fault: str, caught: str) -> None:
    results = run_ranks(lines_of, 2, folder, part, fault, folder)
    # All ranks know the worst of all ranks.
    assert results[0].value == results[1].value
    wrong = ", ".join(what for what, ok in results[0].value if not ok)
    for name in caught.split(", "):
        assert name in wrong, results[0].value


@pytest.mark.distributed
def test_slices_travel_through_the_host(folder: Path) -> None:
    results = run_ranks(lines_of, 2, folder, "gradients", "through_the_host", folder)
    assert results[0].value and all(ok for _, ok in results[0].value), results[0].value


def test_a_part_that_fails_leaves_the_others(
    cuda_check: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One raises on a rank, one hangs, one dies, one is not ok; the others run."""
    monkeypatch.setattr(cuda_check, "start_on_one_device", fake_ranks)
    monkeypatch.setitem(cuda_check.PART_LIMITS_S, "recompute", 1)
    written = tmp_path / "result.json"
    started = time.monotonic()
    assert cuda_check.main(["--device", "cpu", "--json", str(written)]) == 1
    assert time.monotonic() - started < 30
    printed = capsys.readouterr().out.splitlines()
    assert printed[:6] == [
        "gradients: it, 0.5, limit 1, ok",
        "attention: rank 1: RuntimeError: no such kernel, FAILED",
        "recompute: took longer than 1 s, FAILED",
        "lifetime: rank 0 ended with code -9: about to die, FAILED",
        "memory: it, not finite, limit 1, FAILED",
        "trace: it, 0.5, limit 1, ok",
    ]
    assert printed[-1] == "NOT OK"
    result = json.loads(written.read_text())
    assert not result["ok"] and [line["part"] for line in result["lines"]] == PARTS


def fake_ranks(
    script: str, ranks: int, *, arguments: list[str], folder: Path, device: str
) -> list[subprocess.Popen[bytes]]:
    processes = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-u", "-c", FAKE_RANK, *arguments]
            environment = {**os.environ, "RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


def test_ranks_that_do_not_start_fail_all_parts(
    cuda_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, folder: Path, **__: Any) -> list[subprocess.Popen[bytes]]:
        (folder / "rank0.log").write_text("No module named 'deepspeed'\n")
        (folder / "rank1.log").write_text("")
        ranks = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) for _ in range(2)]
        for rank in ranks:
            rank.wait()
        return ranks

    monkeypatch.setattr(cuda_check, "start_on_one_device", broken)
    assert cuda_check.main(["--device", "cpu", "--parts", "trace,memory"]) == 1
    printed = capsys.readouterr().out
    for part in ("trace", "memory"):
        assert f"{part}: the ranks did not start: rank 0 ended with code 1: No module" in printed


def test_without_time_nothing_is_ok(
    cuda_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_check, "TOTAL_S", -1)
    assert cuda_check.main(["--device", "cpu", "--parts", "trace"]) == 1
    assert "trace: no time was left, FAILED" in capsys.readouterr().out


def test_an_unknown_part_is_refused(cuda_check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cuda_check.main(["--parts", "trace,typo"])
    assert exit_.value.code == 2
    assert "--parts: found 'typo', allowed are gradients, " in capsys.readouterr().err
