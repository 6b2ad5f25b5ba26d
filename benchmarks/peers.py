"""This project against other pipeline engines: the same model, data and optimizer, in one run.

    python benchmarks/peers.py [--sequences 512 1024 ...] [--micro-batches 1 2 ...] [--rounds 8]
                               [--emulated] [--json FILE]

Two pipeline ranks, one core and one thread each, in one process group: stock DeepSpeed,
``torch.distributed.pipelining`` (1F1B, interleaved zero-bubble, ZBV), megatron-core's 1F1B, and
this project with ``"slices": "auto"`` under ``1f1b`` and ``zb-h1``. All use the layers, the
attention kernel, the loss and the optimizer's step of ``competitors.py``, and must first give the
same loss and gradients. Every round runs each of them once, in an order that rotates; numbers are
medians and quartiles. ``--emulated`` adds 8 and 16 stages of sleeping layers (``sleeping.py``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from about import write_results
from launching import pin_to_core, result_of

Row = dict[str, Any]

SEQUENCES = (512, 1024, 2048, 4096, 8192)
MICRO_BATCHES = (1, 2, 4, 8)
STAGES = 2
# One transformer layer in each of ZBV's four stages. The vocabulary is small, so that the output
# layer, which one stage alone has, does not tip the balance between stages.
LAYERS = 4
VOCAB = 256
HEAD_WIDTH = 64
# (sequences up to so many tokens, width of the layers): as wide as the time for the whole matrix
# allows, since a step's attention grows with the square of the sequence.
WIDTHS = ((512, 384), (1024, 256), (2048, 128), (10**9, 64))
# Short steps are timed more often, up to so many times, so that each setting takes about as long:
# on a shared machine one and the same matrix product takes a quarter longer now and then.
MORE_ROUNDS = 4
PROFILE_S = 30
EMULATED_STAGES = (8, 16)
EMULATED_MICRO_BATCHES = (2, 8, 16)
EMULATED_ROUNDS = 3
DILATION = 4.0
# Of relative differences to stock DeepSpeed, in fp32.
TOLERANCE = 1e-4
# What must hold on two stages, of our faster schedule: faster than every peer with few
# micro-batches, hardly slower with many.
FASTER_AT = (1, 2)
HARDLY_SLOWER_AT = 8
HARDLY = 0.03


def main() -> None:
    args = _arguments()
    if "RANK" in os.environ:
        _rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        # A cache of its own: "auto" measures the costs anew.
        rows = result_of(__file__, STAGES, out, TERAPIPE_CACHE=folder)
        if args.emulated:
            for stages in EMULATED_STAGES:
                rows += result_of(__file__, stages, out, "--sleeping", TERAPIPE_CACHE=folder)
    for line in summary(rows):
        print(line)
    if args.json is not None:
        write_results(args.json, {"rows": rows})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES, help="in tokens")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help=f"timed steps of each engine with {max(MICRO_BATCHES)} micro-batches, up to "
        f"{MORE_ROUNDS} times as many with fewer (8)",
    )
    parser.add_argument("--emulated", action="store_true", help="also 8 and 16 emulated stages")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sleeping", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


# Ranks


def _rank(args: argparse.Namespace) -> None:
    if not args.sleeping:
        pin_to_core()
    import torch

    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    rows = _emulated() if args.sleeping else _real(args)
    if torch.distributed.get_rank() == 0:
        args.out.write_text(json.dumps(rows))


def _real(args: argparse.Namespace) -> list[Row]:
    import torch
    from competitors import GPT, DeepSpeed, peers

    rows: list[Row] = []
    for seq_length in args.sequences:
        hidden = width(seq_length)
        model = GPT(
            hidden=hidden,
            heads=hidden // HEAD_WIDTH,
            layers=LAYERS,
            vocab=VOCAB,
            seq_length=seq_length,
        )
        block = {"slices": "auto", "profile_budget_s": PROFILE_S}
        competitors = peers(model)
        for schedule in ("1f1b", "zb-h1"):
            name = f"terapipe-ds {schedule}"
            competitors.append(DeepSpeed(name, model, {**block, "schedule": schedule}))
        check(competitors, model.data(2))
        for micro_batches in args.micro_batches:
            about = {"stages": STAGES, "seq_length": seq_length, "micro_batches": micro_batches}
            _log(f"{about}, width {hidden}")
            data = model.data(micro_batches)
            more = min(MORE_ROUNDS, max(1, max(MICRO_BATCHES) // micro_batches))
            measured = measure(competitors, data, args.rounds * more)
            found = [{**about, "hidden": hidden, **row} for row in measured]
            for line in tables(found):
                _log(line)
            rows += found
            if args.json is not None and torch.distributed.get_rank() == 0:
                # All of them take an hour: what there is outlives an interruption.
                write_results(args.json, {"rows": rows})
    return rows


def _emulated() -> list[Row]:
    import torch
    from competitors import DeepSpeed, Sleeping, peers
    from sleeping import SEQ_LENGTH, Dilation, Formula

    from terapipe_ds.planner import Plan, plan

    stages = torch.distributed.get_world_size()
    dilation = Dilation()
    model = Sleeping(dilation, seq_length=SEQ_LENGTH)
    competitors = peers(model)
    for schedule in ("1f1b", "zb-h1"):

        def planned(micro_batches: int, schedule: str = schedule) -> Plan:
            return plan(
                Formula(),
                seq_length=SEQ_LENGTH,
                stages=stages,
                sequences=1,
                micro_batches=micro_batches,
                objective="simulate",
                schedule=schedule,
                warmup="auto",
            )

        block = {"slices": 1, "schedule": schedule}
        competitors.append(DeepSpeed(f"terapipe-ds {schedule}", model, block, planned))
    check(competitors, model.data(2))
    rows: list[Row] = []
    for micro_batches in EMULATED_MICRO_BATCHES:
        about = {"stages": stages, "seq_length": SEQ_LENGTH, "micro_batches": micro_batches}
        _log(f"{about}, emulated")
        data = model.data(micro_batches)
        # Connections and orders, in no time.
        dilation.factor = 0.0
        measure(competitors, data, 1)
        dilation.factor = DILATION
        rows += [
            {**about, **row} for row in measure(competitors, data, EMULATED_ROUNDS, warm_up=False)
        ]
    return rows


def check(competitors: Sequence[Any], data: Sequence[Any]) -> None:
    """Ends the program, on all ranks, if engines give different losses or gradients."""
    from competitors import differences

    found = differences(competitors, data)
    for name, (loss, grads) in found.items():
        _log(f"{name:32} differs by {loss:.1e} in the loss, {grads:.1e} in gradients")
    wrong = [name for name, errors in found.items() if not max(errors) <= TOLERANCE]
    if wrong:
        sys.exit(f"not the same loss and gradients as {competitors[0].name}: {', '.join(wrong)}")


def measure(
    competitors: Sequence[Any], data: Sequence[Any], rounds: int, *, warm_up: bool = True
) -> list[Row]:
    """Times steps of all engines that can run so few micro-batches, in turns."""
    from competitors import NotApplicable

    rows: list[Row] = []
    ready: list[tuple[Any, Row]] = []
    for competitor in competitors:
        row: Row = {"name": competitor.name, "is_ours": competitor.is_ours, "seconds": []}
        rows.append(row)
        try:
            row["runs"] = competitor.prepare(len(data))
        except NotApplicable as error:
            row["refused"] = str(error)
            continue
        ready.append((competitor, row))
    for number in range(-int(warm_up), rounds):
        # Each round starts with another one, so that none always follows the same neighbour.
        for offset in range(len(ready)):
            competitor, row = ready[(number + offset) % len(ready)]
            seconds = _step(competitor, data)
            if number >= 0:
                row["seconds"].append(seconds)
    for competitor, row in ready:
        if competitor.is_ours:
            row["slices"], row["warmup"] = competitor.slices(), competitor.warmup()
    return rows


def _step(competitor: Any, data: Sequence[Any]) -> float:
    import torch

    gc.collect()
    torch.distributed.barrier()
    start = time.perf_counter()
    competitor.step(data)
    torch.distributed.barrier()
    return time.perf_counter() - start


def _log(line: str) -> None:
    import torch

    if torch.distributed.get_rank() == 0:
        print(line, flush=True)


def width(seq_length: int) -> int:
    """The layers' width for sequences of a length."""
    return next(hidden for longest, hidden in WIDTHS if seq_length <= longest)


# Reports


def by_setting(rows: Sequence[Row]) -> dict[tuple[int, int, int], list[Row]]:
    """Measured rows by (stages, tokens, micro-batches)."""
    found: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        key = (row["stages"], row["seq_length"], row["micro_batches"])
        found.setdefault(key, [])
        if row["seconds"]:
            found[key].append(row)
    return found


def median(row: Row) -> float:
    """Seconds of a step."""
    return statistics.median(row["seconds"])


def quartiles(row: Row) -> tuple[float, float]:
    """The lower and the upper quartile of a step's seconds."""
    if len(row["seconds"]) < 2:
        return median(row), median(row)
    low, _, high = statistics.quantiles(row["seconds"], n=4, method="inclusive")
    return low, high


def fastest(rows: Sequence[Row], *, ours: bool) -> Row:
    """The fastest of our engines, or of the peers."""
    return min((row for row in rows if row["is_ours"] == ours), key=median)


def gain(rows: Sequence[Row]) -> float:
    """How many times faster our faster schedule is than the fastest peer."""
    return median(fastest(rows, ours=False)) / median(fastest(rows, ours=True))


def peer_wins(rows: Sequence[Row]) -> list[str]:
    """One line for each setting in which a peer is faster than both of our schedules."""
    lines = []
    for (stages, seq_length, micro_batches), found in by_setting(rows).items():
        if gain(found) >= 1:
            continue
        peer, ours = fastest(found, ours=False), fastest(found, ours=True)
        apart = quartiles(peer)[1] < quartiles(ours)[0]
        lines.append(
            f"{stages} stages, {seq_length} tokens, {micro_batches} micro-batches: {peer['name']} "
            f"by {1 / gain(found) - 1:.1%} over {ours['name']}{slack(ours)} in slices of "
            f"{ours['slices']}"
            f"{'' if apart else ' (quartiles overlap)'}"
        )
    return lines


def slack(row: Row) -> str:
    """The slack of our schedule, where it has any."""
    return f", warmup {row['warmup']}" if row.get("warmup") else ""


def targets(rows: Sequence[Row]) -> dict[str, bool]:
    """What must hold on two stages, and whether it does; nothing of what was not measured."""
    found = {key[1:]: gain(rows) for key, rows in by_setting(rows).items() if key[0] == STAGES}
    few = [gained for (_, count), gained in found.items() if count in FASTER_AT]
    many = [gained for (_, count), gained in found.items() if count == HARDLY_SLOWER_AT]
    told: dict[str, bool] = {}
    if few:
        name = f"faster than every peer at {' and '.join(map(str, FASTER_AT))} micro-batches"
        told[name] = min(few) > 1
    if many:
        name = f"at most {HARDLY:.0%} slower than the best at {HARDLY_SLOWER_AT}"
        told[name] = min(many) >= 1 / (1 + HARDLY)
    return told


def summary(rows: Sequence[Row]) -> list[str]:
    """Tables, where peers win, and targets."""
    lines = [*tables(rows), "", "Where a peer wins", *(peer_wins(rows) or ["nowhere"]), ""]
    lines += [f"{name}: {'met' if met else 'MISSED'}" for name, met in targets(rows).items()]
    return lines


def tables(rows: Sequence[Row]) -> list[str]:
    """A table for each setting."""
    lines: list[str] = []
    for (stages, seq_length, micro_batches), found in by_setting(rows).items():
        best = min(map(median, found))
        title = f"{stages} stages, {seq_length} tokens, {micro_batches} micro-batches"
        lines += ["", title, f"{'':32}{'median s':>10}{'quartiles':>18}{'to fastest':>12}"]
        for row in found:
            low, high = quartiles(row)
            spread = f"{low:.3f} - {high:.3f}"
            lines.append(
                f"{row['name']:32}{median(row):>10.3f}{spread:>18}{median(row) / best:>11.2f}x"
                f"  {row['runs']}{slack(row)} {row.get('slices', '')}"
            )
    return lines


if __name__ == "__main__":
    main()
