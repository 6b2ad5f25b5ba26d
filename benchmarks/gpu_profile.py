"""One GPU: are its attention kernels right, how fast are they, what do GPT-3's layers cost there.

    python benchmarks/gpu_profile.py --out FOLDER [--device cuda|cpu] [--minutes 7.5] [--small]

Needs torch and numpy alone (and matplotlib for the picture). Five parts share the time out:

1. every attention kernel, forward and backward, against plain math in fp64
   (``gpu_correctness.py``);
2. the kernels' speed on rectangles, and which one torch picks (``gpu_speed.py``);
3. the costs of one layer of GPT3-175B (one rank of tensor parallel 8: its shard of the weights,
   without the communication) and of GPT3-13B, measured in slices and fitted (``gpu_layer.py``);
4. plans for 48 stages of two 175B layers each, beside no slicing. Communication is not in them,
   nor the embedding and the head (``gpu_plans.py``);
5. the picture (``gpu_picture.py``).

It leaves ``result.json``, ``picture.png``, the cost files and the plan files. The exit
code is 1 if a kernel that ran is wrong, or a part failed. Times are medians, in ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# The checkout's package, on a machine where nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_common import SEED, Row, device_name
from gpu_correctness import check_kernels, print_kernels
from gpu_layer import print_fit, profile, profile_row
from gpu_picture import draw, print_picture
from gpu_plans import make_plans, print_plans
from gpu_sizes import FULL, SMALL, Layer, Size
from gpu_speed import print_speed, time_kernels

from terapipe_ds.files import write_text
from terapipe_ds.planner import CostModel

SCHEMA = "terapipe-gpu-profile"
VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all parts; returns the exit code."""
    args = _arguments(argv)
    size = SMALL if args.small else FULL
    device = torch.device(args.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("highest")
    run = Run(args.out, Clock(60 * args.minutes), _header(args, device))
    costs: dict[str, CostModel] = {}
    # Refusals say why in warnings, which are recorded where they count.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.part("kernels", 0.3, lambda end: check_kernels(size, device, end), print_kernels)
        run.part("speed", 0.2, lambda end: time_kernels(size, device, end), print_speed)
        for layer, share in zip(size.layers, (0.45, 0.7), strict=True):
            work = partial(_profile_into, costs, layer, size, device, args.out)
            run.part(f"profile {layer.name}", share, work, print_fit)
    cost = costs.get(size.layers[0].name)
    if cost is not None:
        run.part("plans", 1.0, lambda end: make_plans(cost, size, end, args.out), print_plans)
    profiles = [found for name, found in run.result.items() if name.startswith("profile ")]
    if profiles:
        machine = run.result["machine"]["name"]
        run.part("picture", 1.0, lambda end: draw(profiles, args.out, machine), print_picture)
    return 0 if run.finish() else 1


def _profile_into(
    costs: dict[str, CostModel],
    layer: Layer,
    size: Size,
    device: torch.device,
    out: Path,
    deadline: float,
) -> Row:
    """Profiles a layer, saves its costs, and keeps them for the plans."""
    cost, rounds = profile(layer, size, device, deadline)
    path = out / f"cost-{layer.name}.json"
    cost.save(path)
    costs[layer.name] = cost
    return profile_row(cost, rounds, path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder for all files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all parts together")
    parser.add_argument("--small", action="store_true", help="small shapes, for a test")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: found cuda, but torch sees no CUDA device; allowed here is cpu")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes: found {args.minutes}, allowed is a time above 0")
    return args


def _header(args: argparse.Namespace, device: torch.device) -> Row:
    """What is known before the first part."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "small": args.small,
        "minutes": args.minutes,
        "machine": _machine(device),
        "ok": False,
        "failed": {},
        "seconds": {},
    }


def _machine(device: torch.device) -> Row:
    found: Row = {
        "device": device.type,
        "name": device_name(device),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


class Clock:
    """Shares the time out: a part gets a share of what is left when it starts."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def deadline(self, share: float) -> float:
        """When a part must end, in seconds of ``time.monotonic``."""
        now = time.monotonic()
        return now + share * max(0.0, self._end - now)


class Run:
    """The result so far; it is written after each part, so that little is lost if the machine goes.

    Args:
        out: the folder.
        clock: the time for all parts.
        result: what is known before the first part.
    """

    def __init__(self, out: Path, clock: Clock, result: Row) -> None:
        self.out, self.clock, self.result = out, clock, result

    def part(
        self, name: str, share: float, work: Callable[[float], Any], show: Callable[[Any], None]
    ) -> None:
        """Runs one part, notes its time, prints what it found; a failure does not stop the rest.

        Args:
            name: of the part, in the result too.
            share: of the time that is left.
            work: gets the deadline, returns what is found.
            show: prints it.
        """
        started = time.monotonic()
        try:
            self.result[name] = work(self.clock.deadline(share))
            show(self.result[name])
        except Exception as error:
            self.result["failed"][name] = traceback.format_exc()
            print(f"\n{name}: FAILED, {type(error).__name__}: {error}")
        self.result["seconds"][name] = time.monotonic() - started
        sys.stdout.flush()
        self._write()

    def finish(self) -> bool:
        """Whether all is right: no kernel wrong, no part failed."""
        right = self.result.get("kernels", {}).get("ok", False)
        self.result["ok"] = right and not self.result["failed"]
        self._write()
        seconds = ", ".join(f"{name} {s:.0f} s" for name, s in self.result["seconds"].items())
        print(f"\n{seconds}\n{self.out}: {'all right' if self.result['ok'] else 'NOT RIGHT'}")
        return self.result["ok"]

    def _write(self) -> None:
        write_text(self.out / "result.json", json.dumps(self.result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
