"""Starts real ranks for a test, with a time limit, and brings back what they return.

Ranks are forked from one server that has imported torch, DeepSpeed and megatron-core already, so a
test pays for the imports once. A rank that hangs is ended, and is a failure that shows its output.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOAD = ["tests.distributed.workers"]

_context = multiprocessing.get_context("forkserver")


@dataclass
class RankResult:
    """How one rank ended."""

    rank: int
    exit_code: int | None
    output: str
    value: Any
    ended_at: float
    """The machine's clock when the rank was found to have ended."""

    @property
    def error(self) -> str:
        """The last line that the rank printed to stderr, where errors stand."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    folder: Path,
    *args: Any,
    timeout: float = 120,
    expect_success: bool = True,
    **kwargs: Any,
) -> list[RankResult]:
    """Runs ``function(*args, **kwargs)`` on ``world`` ranks under gloo.

    Args:
        function: a function of an importable module.
        world: the number of ranks.
        folder: where outputs and values are written.
        timeout: seconds after which ranks that still run are ended and the test fails.
        expect_success: whether a rank that ends with another exit code than 0 fails the test.

    Returns:
        For each rank how it ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    _context.set_forkserver_preload(PRELOAD)
    started = time.monotonic()
    processes = [
        _context.Process(
            target=_rank, args=(rank, world, port, str(folder), function, args, kwargs), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    ended: dict[int, float] = {}
    while len(ended) < world and time.monotonic() - started < timeout:
        for rank, process in enumerate(processes):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.time()
        time.sleep(0.05)
    hung = [rank for rank in range(world) if rank not in ended]
    for rank in hung:
        processes[rank].kill()
    for process in processes:
        process.join()
    results = [
        RankResult(
            rank,
            processes[rank].exitcode,
            _read(folder / f"rank{rank}.out") + _read(folder / f"rank{rank}.err"),
            _load(folder / f"rank{rank}.pickle"),
            ended.get(rank, math.inf),
        )
        for rank in range(world)
    ]
    if hung or (expect_success and any(result.exit_code for result in results)):
        tails = "\n".join(
            f"--- rank {result.rank}, exit code {result.exit_code}\n{result.output[-3000:]}"
            for result in results
        )
        raise AssertionError(f"ranks {hung} hung; " * bool(hung) + f"ranks failed:\n{tails}")
    return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int,
    world: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        os.dup2(os.open(f"{folder}/rank{rank}.{name}", flags, 0o644), stream)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        value = function(*args, **kwargs)
        with open(f"{folder}/rank{rank}.pickle", "wb") as file:
            pickle.dump(value, file)
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries must not keep a rank that is done.
    os._exit(code)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _load(path: Path) -> Any:
    if not path.exists():
        return None
    with path.open("rb") as file:
        return pickle.load(file)
