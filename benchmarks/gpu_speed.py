"""Part 2 of ``gpu_profile.py``: how fast the attention kernels are, and which one torch picks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from gpu_common import Row, dtype_name, layer_dtype, synchronize
from gpu_kernels import Ran, Refused, attempt, kernels, random_tensors, run_kernel
from gpu_sizes import Size

SPEED_ROUNDS = 31


@dataclass
class Timed:
    """A kernel on a rectangle, and its times in ms, forward and backward together."""

    length: int
    context: int
    kernel: str
    ran: str
    work: Callable[[], Ran]
    times: list[float] = field(default_factory=list)

    def run(self, device: torch.device) -> None:
        """Runs it once more, its launches included."""
        synchronize(device)
        start = time.perf_counter()
        self.work()
        synchronize(device)
        self.times.append((time.perf_counter() - start) * 1e3)


def time_kernels(size: Size, device: torch.device, deadline: float) -> Row:
    """Times all kernels on all rectangles, in turns."""
    dtype = layer_dtype(device)
    heads, width = size.speed_heads
    timed: list[Timed] = []
    refused: list[Row] = []
    skipped = 0
    for length, context in size.speed:
        if time.monotonic() > deadline:
            skipped += 1
            continue
        *qkv, grad = random_tensors(
            length, context, (heads, heads), width, dtype, device, sequences=1
        )
        for name, kernel in kernels(device, context).items():
            work = partial(run_kernel, kernel, qkv, grad)
            try:
                ran = attempt(work, device)
            except Refused as refusal:
                where = {"length": length, "context": context, "kernel": name}
                refused.append({**where, "reason": str(refusal)})
                continue
            timed.append(Timed(length, context, name, ran.kernel, work))
    for _ in range(SPEED_ROUNDS):
        for entry in timed:
            if time.monotonic() > deadline and entry.times:
                break
            entry.run(device)
    return {
        "dtype": dtype_name(dtype),
        "heads": heads,
        "width": width,
        "skipped_for_time": skipped,
        "rows": [_speed_row(entry) for entry in timed],
        "refused": refused,
    }


def _speed_row(entry: Timed) -> Row:
    return {
        "length": entry.length,
        "context": entry.context,
        "kernel": entry.kernel,
        "ran": entry.ran,
        "ms": statistics.median(entry.times),
        "rounds": len(entry.times),
        "raw_ms": entry.times,
    }


def print_speed(found: Row) -> None:
    names = list(dict.fromkeys(row["kernel"] for row in found["rows"]))
    print(
        f"\nForward and backward in ms, {found['dtype']}, {found['heads']} heads of "
        f"{found['width']}, one sequence"
    )
    columns = "".join(f"{name:>16}" for name in names)
    print(f"  {'length':>6}{'context':>9}{columns}  torch picks")
    by_shape: dict[tuple[int, int], dict[str, Row]] = {}
    for row in found["rows"]:
        by_shape.setdefault((row["length"], row["context"]), {})[row["kernel"]] = row
    for (length, context), rows in by_shape.items():
        times = "".join(f"{rows[n]['ms']:>16.3f}" if n in rows else f"{'-':>16}" for n in names)
        picked = rows["sdpa"]["ran"] if "sdpa" in rows else "-"
        print(f"  {length:>6}{context:>9}{times}  {picked}")
    if found["skipped_for_time"]:
        print(f"  {found['skipped_for_time']} rectangles were left out for lack of time")
