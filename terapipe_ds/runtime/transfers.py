"""Times messages between two processes of this machine, where no pipeline runs to time them in."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

from ..planner.cost import Transfer

_REPEATS = 9
_TIMEOUT = timedelta(seconds=60)


def time_transfers(*, bytes_per_token: float, most_tokens: int) -> Transfer:
    """Round trips of messages of up to ``most_tokens`` tokens.

    On a machine with two GPUs over NCCL, otherwise over gloo; what lies between two machines of a
    cluster has to be measured there.

    Args:
        bytes_per_token: what crosses between two stages for one token.
        most_tokens: of the longest message.
    """
    sizes = sorted({max(1, int(bytes_per_token * most_tokens / 4**k)) for k in range(5)})
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        # Start methods other than fork: this process may hold a device.
        torch.multiprocessing.start_processes(
            _rank, args=(str(store), sizes, folder), nprocs=2, start_method="spawn"
        )
        lines = (Path(folder) / "times").read_text().split()
    samples = [(float(size), float(ms)) for size, ms in zip(sizes, lines, strict=True)]
    return Transfer.fitted([samples], bytes_per_token=bytes_per_token)


def _rank(rank: int, store: str, sizes: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 1
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed = torch.distributed
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=distributed.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=_TIMEOUT,
    )
    times = [_one_way_ms(rank, size, device) for size in sizes]
    if rank == 0:
        (Path(folder) / "times").write_text("\n".join(map(str, times)))
    distributed.destroy_process_group()


def _one_way_ms(rank: int, size: int, device: torch.device) -> float:
    distributed = torch.distributed
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                distributed.send(message, 1 - rank)
            else:
                distributed.recv(message, 1 - rank)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / 2)
    return median(times)


__all__ = ["time_transfers"]
