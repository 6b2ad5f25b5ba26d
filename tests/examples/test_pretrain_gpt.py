"""The main job, small, under DeepSpeed's own launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.distributed


def launch(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    launcher = Path(sys.executable).with_name("deepspeed")
    return subprocess.run(
        [str(launcher), "--num_gpus=2", f"--master_port={free_port()}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_trains_both_and_compares(tmp_path: Path, extensions_built: None) -> None:
    result = launch(
        "examples/pretrain_gpt.py",
        *("--deepspeed_config", "configs/quickstart.json", "--out", str(tmp_path)),
        *("--steps", "12", "--layers", "2", "--hidden", "96", "--seq-length", "256"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    gap = re.search(r"largest loss difference\s*│\s*│\s*(\S+)", result.stdout)
    assert gap is not None, result.stdout
    assert float(gap[1]) < 1e-4
    first, last = (
        float(re.search(rf"loss, {name}\s*│\s*(\S+)", result.stdout)[1])
        for name in ("first step", "mean of last 8")
    )
    assert last < first - 0.2, "does not learn"
    assert "step 5/12" in result.stderr, "shows no progress"

    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    forwards = [
        e["name"] for e in events if e.get("cat") == "F" and e["pid"] == 1 and e["tid"] == 0
    ]
    assert forwards == [f"F0.{index}" for index in range(8)]
