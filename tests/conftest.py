"""Settings for all tests: one thread a rank, the CPU accelerator, a fixed seed that is printed."""

from __future__ import annotations

import os
import sys

# Before anything imports DeepSpeed or torch.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"
# The environment's own ninja: another one would compile DeepSpeed's helpers again.
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"

from pathlib import Path

import pytest

SEED = 20210216


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

    folder = tmp_path_factory.mktemp("extensions")
    run_ranks(initialize_distributed, 1, folder, timeout=900)


@pytest.fixture
def folder(tmp_path: Path, extensions_built: None) -> Path:
    """A folder for ranks."""
    return tmp_path
