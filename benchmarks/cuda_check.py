"""One GPU, two ranks: are sliced gradients, recomputation and the life of buffers right there?

    python benchmarks/cuda_check.py [--device cuda|cpu] [--parts NAMES] [--json FILE]

Two pipeline ranks share the first GPU and talk over gloo, through the host: NCCL refuses two ranks
on one GPU. What is checked (``cuda_check_parts.py``):

- gradients: sliced against stock DeepSpeed, fp64, fp32 (without TF32) and bf16;
- attention: torch's kernels on rectangles and windows against plain math;
- recompute: DeepSpeed's and megatron's recomputation, with dropout;
- lifetime: transfers that run late on a stream of their own, as NCCL's do, over memory that is
  spoiled as soon as it is free (``late_transfers.py``);
- memory: what steps and evaluations leave behind;
- trace: the device's clock.

``--device cpu`` runs the same on small sizes. Each comparison prints ``part: what, largest
difference, limit, ok``. The exit code is 1 if one is not ok, or a part raised or ran out of time;
then the ranks are started again for the parts that are left. Under 8 minutes in all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The checkout's package, on a machine where nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launching import start_on_one_device

RANKS = 2
# Seconds that a part may take: many times what the small sizes take on one CPU core. More than
# TOTAL_S in all, since few parts need theirs.
PART_LIMITS_S = {
    "gradients": 150,
    "attention": 90,
    "recompute": 90,
    "lifetime": 90,
    "memory": 60,
    "trace": 60,
}
# Until the first part begins: imports, and the device's first use.
START_LIMIT_S = 150
TOTAL_S = 460
LOG_TAIL = 30


@dataclass
class Result:
    """What all parts gave, in order.

    Attributes:
        lines: for each comparison its part, what it is, the difference, the limit, whether it is
            ok; a part that failed has one of its own, without numbers.
        seconds: that each part took.
        machine: where.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.lines) and all(line["ok"] for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Takes a line and prints it."""
        self.lines.append(line)
        numbers = ""
        if line["limit"] is not None:
            difference = line["difference"]
            shown = "not finite" if difference is None else f"{difference:.2g}"
            numbers = f", {shown}, limit {line['limit']:.2g}"
        verdict = "ok" if line["ok"] else "FAILED"
        print(f"{line['part']}: {line['what']}{numbers}, {verdict}", flush=True)

    def fail(self, part: str, reason: str) -> None:
        """A part that gave no result, or not all of it."""
        what = " ".join(reason.split())
        self.add({"part": part, "what": what, "difference": None, "limit": None, "ok": False})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; returns the exit code."""
    args = _arguments(argv)
    if "RANK" in os.environ:
        _run_rank(args)
    result = Result()
    started = time.monotonic()
    check(args.device, args.parts, result, until=started + TOTAL_S)
    seconds = ", ".join(f"{name} {taken:.0f} s" for name, taken in result.seconds.items())
    print(f"\n{seconds}; {time.monotonic() - started:.0f} s in all")
    print("all ok" if result.ok else "NOT OK")
    if args.json is not None:
        content = {"ok": result.ok, **vars(result)}
        temporary = args.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        temporary.replace(args.json)
    return 0 if result.ok else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PART_LIMITS_S), help="some of the parts")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = [name for name in args.parts if name not in PART_LIMITS_S]
    if unknown:
        parser.error(f"--parts: found {unknown[0]!r}, allowed are {', '.join(PART_LIMITS_S)}")
    return args


def check(device: str, parts: Sequence[str], result: Result, *, until: float) -> None:
    """Runs parts on ranks; after one that ends its ranks, the rest on new ones.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        parts: their names.
        result: where what they give is added.
        until: when all must be over, in seconds of ``time.monotonic``.
    """
    left = list(parts)
    while left:
        if time.monotonic() > until:
            for part in left:
                result.fail(part, "no time was left")
            return
        with tempfile.TemporaryDirectory() as folder:
            attempt = _Attempt(device, left, Path(folder), result)
            reason = attempt.run(until)
        if reason is None:
            return
        if attempt.part is None:
            # What keeps ranks from starting keeps them from starting again.
            for part in left:
                result.fail(part, f"the ranks did not start: {reason}")
            return
        result.fail(attempt.part, reason)
        left.remove(attempt.part)


class _Attempt:
    """Ranks that run the parts ``left``, each of which is taken from there when it is done."""

    def __init__(self, device: str, left: list[str], folder: Path, result: Result) -> None:
        self._left, self._folder, self._result = left, folder, result
        self._processes = start_on_one_device(
            __file__,
            RANKS,
            arguments=["--device", device, "--parts", ",".join(left), "--folder", str(folder)],
            folder=folder,
            device=device,
        )
        self._read = 0
        self._since = time.monotonic()
        self.part: str | None = None
        """Which one is running."""

    def run(self, until: float) -> str | None:
        """Follows the ranks to their end; None if that is a good one, or the reason."""
        try:
            while True:
                ended = [process.poll() for process in self._processes]
                self._take_records()
                if any(ended) or None not in ended:
                    break
                if self._is_late(until):
                    return f"took longer than {time.monotonic() - self._since:.0f} s"
                time.sleep(0.05)
            if not any(ended) and not self._left:
                return None
            return self._failure()
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _is_late(self, until: float) -> bool:
        limit = START_LIMIT_S if self.part is None else PART_LIMITS_S[self.part]
        return time.monotonic() > min(until, self._since + limit)

    def _take_records(self) -> None:
        """What rank 0 has written since."""
        records = _records(self._folder, 0)
        for record in records[self._read :]:
            if "machine" in record:
                self._result.machine = record["machine"]
                print(", ".join(str(value) for value in record["machine"].values()), flush=True)
            elif "begins" in record:
                self.part, self._since = record["begins"], time.monotonic()
            elif "lines" in record:
                for line in record["lines"]:
                    self._result.add({"part": self.part, **line})
                self._result.seconds[self.part] = time.monotonic() - self._since
                self._left.remove(self.part)
                self.part, self._since = None, time.monotonic()
        self._read = len(records)

    def _failure(self) -> str:
        """What a rank says of it, or how it ended; its output goes to stderr."""
        # The first rank that fails takes the others with it, a moment later.
        time.sleep(1)
        # Rank 0 may have been behind the one that failed.
        self._take_records()
        reasons = []
        for rank, process in enumerate(self._processes):
            log = (self._folder / f"rank{rank}.log").read_text(errors="replace")
            print(f"--- rank {rank}\n{_tail(log)}", file=sys.stderr)
            errors = [record for record in _records(self._folder, rank) if "error" in record]
            reasons += [(error["at"], f"rank {rank}: {error['error']}") for error in errors]
            code = process.poll()
            if code:
                last = (log.splitlines() or ["no output"])[-1]
                reasons.append((math.inf, f"rank {rank} ended with code {code}: {last}"))
        return min(reasons, default=(0.0, "the ranks ended early"))[1]


def _records(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank{rank}.records"
    text = path.read_text() if path.exists() else ""
    # The last line may be half written.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_TAIL:])


def _run_rank(args: argparse.Namespace) -> None:
    """One of the ranks; does not return."""
    records = (args.folder / f"rank{os.environ['RANK']}.records").open("a")

    def write(**record: Any) -> None:
        records.write(json.dumps(record) + "\n")
        records.flush()

    code = 0
    try:
        from cuda_check_parts import PARTS, set_up

        rig = set_up(args.device, args.folder)
        write(machine=_machine(args.device))
        for name in args.parts:
            write(begins=name)
            lines = PARTS[name](rig)
            write(lines=[_plain(line) for line in lines])
    except BaseException as error:
        traceback.print_exc()
        write(error=f"{type(error).__name__}: {error}"[:500], at=time.time())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries must not keep a rank that is done, nor its peer one that has failed.
    os._exit(code)


def _plain(line: Any) -> dict[str, Any]:
    """A line as strict JSON."""
    finite = line.difference if math.isfinite(line.difference) else None
    return {"what": line.what, "difference": finite, "limit": line.limit, "ok": line.ok}


def _machine(device: str) -> dict[str, Any]:
    import deepspeed
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"torch": f"torch {torch.__version__}", "python": f"Python {sys.version.split()[0]}"}
    return {"device": name, **versions, "deepspeed": f"DeepSpeed {deepspeed.__version__}"}


if __name__ == "__main__":
    sys.exit(main())
