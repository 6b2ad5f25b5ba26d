"""Schedules at scale on one machine: real engine, real launcher, real messages, sleeping layers.

    python benchmarks/emulate.py --table [--json FILE]     # 8, 16 and 24 stages
    python benchmarks/emulate.py --stages 48               # one size, once

Each stage is a rank under DeepSpeed's launcher that runs the real ``TokenSliceEngine`` (or stock
DeepSpeed's ``PipelineEngine``) and sends real messages over gloo. Only the layers' arithmetic is
replaced: forward and backward sleep for as long as a cost formula says, which leaves the cores
free, so that many ranks fit on two of them. Schedules, messages, overlap and the engine's overhead
are real.

What it does not show: how long real layers take, contention for memory or for a network, transfers
of real size (tensors are narrow). Sleeps are stretched by a dilation factor, which is printed, so
that the bookkeeping of many ranks on few cores does not drown them.

Simulated times come from the same formula without any transfer cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from about import write_results
from launching import launch

MICRO_BATCHES = 2
EVEN = (8, 16)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
TABLE_STAGES = (8, 16, 24)
# What must hold.
SPEEDUP_SHARE = 0.95
MAKESPAN_OVER = 0.05
ENGINE_US = 300.0
BEATS_BY = 0.03


def main() -> None:
    args = _arguments()
    if "RANK" in os.environ:
        _rank(args)
        return
    sizes = TABLE_STAGES if args.table else (args.stages,)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        for stages in sizes:
            result = _launch(stages, out)
            rows += result["rows"]
            _print(result)
        # Three ranks: a stage with both neighbours, and cores that are not fought over.
        engine_us = _launch(3, out, "--engine-time")["engine_us"]
    print(f"\nengine's own time for a slice, on the busiest of 3 stages: {engine_us:.0f} us")
    missed = _missed(rows, engine_us)
    print(f"\ntargets: {'met' if not missed else 'missed: ' + '; '.join(missed)}")
    if args.json is not None:
        write_results(args.json, {"rows": rows, "engine_us": engine_us})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="8, 16 and 24 stages")
    parser.add_argument("--stages", type=int, default=8, help="one number of stages")
    parser.add_argument("--dilation", type=float, default=10.0, help="at most 10")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each setting")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine-time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    if not 0 < args.dilation <= 10:
        parser.error(f"--dilation: found {args.dilation}, allowed is more than 0 and at most 10")
    return args


def _launch(stages: int, out: Path, *more: str) -> Any:
    """Runs this file on as many ranks; what its first rank wrote."""
    arguments = [*sys.argv[1:], f"--stages={stages}", f"--out={out}", *more]
    code = launch(__file__, stages, arguments=arguments, quiet=True)
    if code:
        sys.exit(code)
    return json.loads(out.read_text())


# Ranks


def _rank(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    import deepspeed
    from sleeping import Dilation, sleeping_data, sleeping_engine

    deepspeed.init_distributed("gloo")
    settings = _settings(args.stages)
    dilation, data = Dilation(), sleeping_data(MICRO_BATCHES)
    block = {"slices": 1, "timeout_s": 300}
    sliced = sleeping_engine(block, dilation, micro_batches=MICRO_BATCHES)
    if args.engine_time:
        _write(args.out, {"engine_us": engine_time(sliced, data, slices=16)})
        return
    stock = sleeping_engine(None, dilation, micro_batches=MICRO_BATCHES)

    # Connections, boundaries and orders, in no time.
    for setting in settings:
        _step(stock if setting["schedule"] == "stock" else sliced, setting, data)
    dilation.factor = args.dilation
    for repeat in range(args.repeats):
        for offset in range(len(settings)):
            setting = settings[(repeat + offset) % len(settings)]
            engine = stock if setting["schedule"] == "stock" else sliced
            setting["measured"].append(_step(engine, setting, data))
    rows = _rows(settings, args)
    _write(args.out, {"stages": args.stages, "rows": rows, "memory_gib": memory_gib()})


def _write(path: Path, content: Any) -> None:
    import torch

    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps(content))


def _settings(stages: int) -> list[dict[str, Any]]:
    """Stock, and every schedule with every scheme; the planner's own depends on the schedule."""
    from sleeping import SEQ_LENGTH, Formula

    from terapipe_ds.planner import plan

    settings: list[dict[str, Any]] = [{"schedule": "stock", "slices": 1, "measured": []}]
    for schedule in SCHEDULES:
        chosen = plan(
            Formula(),
            seq_length=SEQ_LENGTH,
            stages=stages,
            sequences=1,
            micro_batches=MICRO_BATCHES,
            objective="simulate",
            schedule=schedule,
        )
        own = list(chosen.scheme.groups[0].lengths)
        for slices in (*EVEN, own):
            settings.append({"schedule": schedule, "slices": slices, "measured": []})
    return settings


def _step(engine: Any, setting: dict[str, Any], data: list[Any]) -> float:
    """One training step; ms from its first forward to the end of its last action."""
    import torch

    from terapipe_ds.runtime.recorder import gather, recorded

    if setting["schedule"] != "stock":
        _set(engine, setting)
    torch.distributed.barrier()
    with recorded(engine) as spans:
        engine.train_batch(iter(data))
    first, last = gather(engine, spans).window
    return (last - first) * 1e3


def _set(engine: Any, setting: dict[str, Any]) -> None:
    """One sliced engine serves all schemes: what its block says is read anew in every step."""
    slices = setting["slices"]
    update = {
        "schedule": setting["schedule"],
        "slices": slices if isinstance(slices, int) else tuple(slices),
    }
    engine.terapipe = engine.terapipe.model_copy(update=update)


def engine_time(engine: Any, data: list[Any], *, slices: int) -> float:
    """us of the engine's own work for a slice, on the busiest stage.

    CPU time of the rank's main thread in the step's instructions, without what layers, the loss and
    autograd take.

    Args:
        engine: ours, on layers that need not compute.
        data: a step's micro-batches.
        slices: even slices of a micro-batch.
    """
    import torch

    setting = {"schedule": "1f1b", "slices": slices}
    spent = {"total": 0.0, "model": 0.0}
    repeats = 20
    _set(engine, setting)
    for _ in range(3):
        engine.train_batch(iter(data))
    with _counted(engine, spent):
        for _ in range(repeats):
            engine.train_batch(iter(data))
    run = repeats * len(data) * slices
    own = torch.tensor((spent["total"] - spent["model"]) / run * 1e6)
    torch.distributed.all_reduce(own, op=torch.distributed.ReduceOp.MAX)
    return own.item()


@contextmanager
def _counted(engine: Any, spent: dict[str, float]) -> Iterator[None]:
    """Adds up the main thread's CPU time in the schedule, and that in layers and autograd."""
    import torch

    def counting(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - start

        return run

    forward, backward = engine.module.forward, torch.autograd.backward
    loss_fn, execute = engine.module.loss_fn, engine._exec_schedule
    engine.module.forward = counting("model", forward)
    engine.module.loss_fn = counting("model", loss_fn)
    torch.autograd.backward = counting("model", backward)
    engine._exec_schedule = counting("total", execute)
    try:
        yield
    finally:
        engine.module.forward, engine.module.loss_fn = forward, loss_fn
        torch.autograd.backward = backward
        del engine._exec_schedule


def memory_gib() -> float:
    """GiB that all ranks hold together, pages that they share counted once."""
    import torch

    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    total = torch.tensor(own / 2**20)
    torch.distributed.all_reduce(total)
    return total.item()


def _rows(settings: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    from sleeping import SEQ_LENGTH, Formula

    from terapipe_ds import SliceScheme
    from terapipe_ds.planner import predict

    rows = []
    for setting in settings:
        scheme = SliceScheme.resolve(
            setting["slices"] if isinstance(setting["slices"], int) else tuple(setting["slices"]),
            sequences=1,
            seq_length=SEQ_LENGTH,
        )
        schedule = "1f1b" if setting["schedule"] == "stock" else setting["schedule"]
        timeline = predict(
            Formula(),
            scheme,
            stages=args.stages,
            schedule=schedule,
            micro_batches=MICRO_BATCHES,
        )
        rows.append(
            {
                "stages": args.stages,
                "schedule": setting["schedule"],
                "slices": setting["slices"],
                "measured_ms": statistics.median(setting["measured"]),
                "simulated_ms": timeline.makespan_ms * args.dilation,
                "dilation": args.dilation,
                "all_ms": setting["measured"],
            }
        )
    stock = rows[0]
    for row in rows:
        row["speedup"] = stock["measured_ms"] / row["measured_ms"]
        row["simulated_speedup"] = stock["simulated_ms"] / row["simulated_ms"]
    return rows


# Reports

_WIDTHS = (12, 14, 8, 9, 11)


def _print(result: dict[str, Any]) -> None:
    rows = result["rows"]
    print(f"\n{result['stages']} stages, dilation {rows[0]['dilation']:g}, medians")
    print(
        f"{'':22}{'measured ms':>12}{'simulated ms':>14}{'over':>8}{'speedup':>9}{'simulated':>11}"
    )
    for row in rows:
        slices = row["slices"]
        name = f"{slices} even" if isinstance(slices, int) else f"planned ({len(slices)})"
        over = row["measured_ms"] / row["simulated_ms"] - 1
        print(
            f"{row['schedule']:8}{name:14}{row['measured_ms']:>12.0f}{row['simulated_ms']:>14.0f}"
            f"{over:>+8.1%}{row['speedup']:>8.2f}x{row['simulated_speedup']:>10.2f}x"
        )
    print(f"memory of all ranks: {result['memory_gib']:.1f} GiB", flush=True)


def _missed(rows: list[dict[str, Any]], engine_us: float) -> list[str]:
    missed = []
    for row in rows:
        name = f"{row['stages']} stages {row['schedule']} {row['slices']}"
        if row["schedule"] == "1f1b":
            share = row["speedup"] / row["simulated_speedup"]
            if share < SPEEDUP_SHARE:
                missed.append(f"{name}: {share:.0%} of the simulated speedup")
        if (
            row["schedule"] != "stock"
            and row["measured_ms"] > (1 + MAKESPAN_OVER) * row["simulated_ms"]
        ):
            missed.append(f"{name}: {row['measured_ms'] / row['simulated_ms'] - 1:+.1%}")
    by_key = {(r["stages"], r["schedule"], str(r["slices"])): r for r in rows}
    for (stages, schedule, slices), row in by_key.items():
        other = by_key.get((stages, "1f1b", slices))
        if schedule != "zb-h1" or other is None:
            continue
        should = row["simulated_ms"] < (1 - BEATS_BY) * other["simulated_ms"]
        if should and row["measured_ms"] >= other["measured_ms"]:
            missed.append(f"{stages} stages: zb-h1 with {slices} does not beat 1f1b")
    if engine_us > ENGINE_US:
        missed.append(f"engine {engine_us:.0f} us")
    return missed


if __name__ == "__main__":
    main()
