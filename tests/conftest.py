"""Settings for all tests: one thread a rank, the CPU accelerator, a fixed seed that is printed."""

from __future__ import annotations

import os
import sys

# Before anything imports DeepSpeed or torch.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"
# The environment's own ninja: another one would compile DeepSpeed's helpers again.
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
# The environment's own folder for compiled helpers: in the user's, a build that was killed may have
# left its lock, on which every later process waits without end.
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")

import fcntl
import time
from pathlib import Path

import pytest

SEED = 20210216
EXTENSIONS = Path(os.environ["TORCH_EXTENSIONS_DIR"])
ABANDONED_S = 300


def pytest_report_header() -> str:
    return f"seed: {SEED}"


@pytest.fixture(scope="session", autouse=True)
def _seeded() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def extensions_built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSpeed compiles a helper at first use; once here, not in every rank at the same time."""
    from tests.distributed.ranks import run_ranks
    from tests.distributed.workers import initialize_distributed

    EXTENSIONS.mkdir(exist_ok=True)
    with (EXTENSIONS / "tests.lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for left in EXTENSIONS.glob("**/lock"):
            # Of a test run that was killed: compiling takes a minute, loading less than a second.
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
        run_ranks(initialize_distributed, 1, tmp_path_factory.mktemp("extensions"), timeout=600)


@pytest.fixture
def folder(tmp_path: Path, extensions_built: None) -> Path:
    """A folder for ranks."""
    return tmp_path
