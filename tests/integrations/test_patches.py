"""The patches apply, and a patched script that is started directly heeds its block."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))

BEFORE = '''# The owner of this file.

"""Pretrain a model."""

import deepspeed

print(hasattr(deepspeed.initialize, "terapipe_ds_stock"))
'''


def patched(folder: Path, patch: Path, *tool: str) -> Path:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    script = folder / "pretrain_gpt.py"
    script.write_text(BEFORE)
    subprocess.run([*tool, str(patch)], cwd=folder, check=True, capture_output=True)
    return script


@pytest.mark.parametrize("tool", [("patch", "-p1", "-i"), ("git", "apply", "--unidiff-zero")])
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_adds_two_lines(tmp_path: Path, tool: tuple[str, ...], patch: Path) -> None:
    first, *rest = BEFORE.splitlines()
    added = ["import terapipe_ds.integrations", "terapipe_ds.integrations.install()"]
    assert patched(tmp_path, patch, *tool).read_text().splitlines() == [first, *added, *rest]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patched_script_heeds_its_block(tmp_path: Path, patch: Path) -> None:
    script = patched(tmp_path, patch, "patch", "-p1", "-i")
    (tmp_path / "ds.json").write_text('{"terapipe": {}}')
    result = subprocess.run(
        [sys.executable, script.name, "--deepspeed_config", "ds.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split()[-1] == "True", result.stdout


def test_there_are_patches() -> None:
    assert PATCHES
