"""What the planner says against what the engine does, on two CPU cores.

    python benchmarks/plan_vs_real.py [--json FILE] [--budget SECONDS]

Two pipeline ranks, one core and one thread each, train a GPT of 8 layers of width 512 on one
micro-batch of one sequence of 2048 tokens. Engines take turns in one run: stock DeepSpeed, 1, 2, 4,
8 and 16 even slices, one uneven scheme, and ``"slices": "auto"``, which measures and plans in its
first step. For each scheme the simulated makespan, from the costs that auto measured, stands beside
the measured one. Numbers are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from launching import launch, pin_to_core
from stock_vs_sliced import HEADS, HIDDEN, LAYERS, SEQ_LENGTH, STAGES, VOCAB, model

EVEN = (1, 2, 4, 8, 16)
UNEVEN = "[(1, [640, 512, 448, 448])]"
# What must hold.
MAKESPAN_WITHIN = 0.10
AUTO_WITHIN = 0.05
HELD_OUT_WITHIN = 0.05


@dataclass
class Contender:
    """An engine, its steps' times and its makespans, in seconds."""

    name: str
    engine: Any
    scheme: str | None = None
    steps: list[float] = field(default_factory=list)
    makespans: list[float] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    if "RANK" not in os.environ:
        # A cache of its own: costs are measured anew.
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(launch(__file__, STAGES, TERAPIPE_CACHE=folder))
    pin_to_core()
    result = _measure(args)
    if result is None:
        return
    _print(result)
    if args.json is not None:
        from terapipe_ds.files import write_text

        write_text(args.json, json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of profiling")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each engine")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


def _measure(args: argparse.Namespace) -> dict[str, Any] | None:
    import deepspeed
    import torch

    from terapipe_ds.models.gpt import batch

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    text = torch.randint(
        0, VOCAB, (1, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1234)
    )
    data = batch(text[:, :-1], text[:, 1:])
    contenders = [Contender("stock", _engine(None))]
    contenders += [
        Contender(f"{count} even", _engine({"slices": count}), _even(count)) for count in EVEN
    ]
    contenders.append(Contender("uneven", _engine({"slices": UNEVEN}), UNEVEN))
    auto = _engine({"slices": "auto", "profile_budget_s": args.budget})
    contenders.append(Contender("auto", auto))
    started = time.perf_counter()
    auto.train_batch(iter([data]))
    planning = time.perf_counter() - started
    contenders[-1].scheme = str(next(iter(auto.plans.values())).scheme)

    for repeat in range(1 + args.repeats):
        for offset in range(len(contenders)):
            _step(contenders[(repeat + offset) % len(contenders)], data, warm_up=repeat == 0)
    return _result(contenders, auto, planning) if torch.distributed.get_rank() == 0 else None


def _engine(block: dict[str, Any] | None) -> Any:
    import torch

    import terapipe_ds

    module = model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        **({} if block is None else {"terapipe": block}),
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return terapipe_ds.initialize(model=module, optimizer=optimizer, config=config)[0]


def _even(count: int) -> str:
    from terapipe_ds import SliceScheme

    return str(SliceScheme.even(sequences=1, seq_length=SEQ_LENGTH, count=count))


def _step(contender: Contender, data: Any, *, warm_up: bool) -> None:
    import torch

    from terapipe_ds.runtime.recorder import gather, recorded

    torch.distributed.barrier()
    with recorded(contender.engine) as spans:
        start = time.perf_counter()
        contender.engine.train_batch(iter([data]))
        torch.distributed.barrier()
        seconds = time.perf_counter() - start
    first, last = gather(contender.engine, spans).window
    if not warm_up:
        contender.steps.append(seconds)
        contender.makespans.append(last - first)


def _result(contenders: list[Contender], auto: Any, planning: float) -> dict[str, Any]:
    from terapipe_ds import SliceScheme
    from terapipe_ds.planner import predict

    cost = auto.costs[1]
    rows = []
    for contender in contenders:
        row: dict[str, Any] = {
            "name": contender.name,
            "scheme": contender.scheme,
            "step_s": statistics.median(contender.steps),
            "makespan_s": statistics.median(contender.makespans),
            "steps_s": contender.steps,
            "makespans_s": contender.makespans,
        }
        if contender.scheme is not None:
            scheme = SliceScheme.from_text(contender.scheme)
            timeline = predict(cost, scheme, stages=STAGES, schedule="1f1b")
            row["simulated_s"] = timeline.makespan_ms / 1e3
            row["error"] = row["simulated_s"] / row["makespan_s"] - 1
        rows.append(row)
    return {
        "model": {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "seq_length": SEQ_LENGTH},
        "first_step_s": planning,
        "held_out_error": {stage.name: stage.error for stage in cost.stages},
        "forms": {stage.name: dict(stage.errors) for stage in cost.stages},
        "rows": rows,
        "targets": _targets(rows, cost),
    }


def _targets(rows: list[dict[str, Any]], cost: Any) -> dict[str, bool]:
    by_name = {row["name"]: row for row in rows}
    simulated = [row for row in rows if "simulated_s" in row and row["name"] != "auto"]
    best = min(by_name[f"{count} even"]["step_s"] for count in EVEN)
    # Schemes that differ by more than 10% must come in the same order.
    pairs = [
        (a, b)
        for a, b in combinations(simulated, 2)
        if max(a["makespan_s"], b["makespan_s"]) > 1.1 * min(a["makespan_s"], b["makespan_s"])
    ]
    ordered = all(
        (a["makespan_s"] < b["makespan_s"]) == (a["simulated_s"] < b["simulated_s"])
        for a, b in pairs
    )
    return {
        "held-out error below 5%": all(stage.error < HELD_OUT_WITHIN for stage in cost.stages),
        "simulated makespans within 10%": all(
            abs(row["error"]) <= MAKESPAN_WITHIN for row in simulated
        ),
        "same order where schemes differ by 10%": ordered,
        "auto within 5% of the best even slices": (
            by_name["auto"]["step_s"] <= (1 + AUTO_WITHIN) * best
        ),
        "auto not slower than stock": by_name["auto"]["step_s"] <= by_name["stock"]["step_s"],
    }


def _print(result: dict[str, Any]) -> None:
    print(f"\n{'':10}{'step s':>9}{'makespan s':>12}{'simulated s':>13}{'error':>8}  scheme")
    for row in result["rows"]:
        simulated = f"{row['simulated_s']:>13.3f}{row['error']:>+8.1%}" if "error" in row else ""
        print(
            f"{row['name']:10}{row['step_s']:>9.3f}{row['makespan_s']:>12.3f}{simulated:21}"
            f"  {row['scheme'] or ''}"
        )
    errors = ", ".join(f"{name} {e:.1%}" for name, e in result["held_out_error"].items())
    print(f"\nheld-out error of the fit (median): {errors}")
    print(f"first step, with profile and plan: {result['first_step_s']:.0f} s\n")
    for name, met in result["targets"].items():
        print(f"{name}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
