"""How the cost of a step grows with the sequence, the slices, the micro-batches and the stages.

    python benchmarks/scaling.py [--only sequence slices ...] [--json FILE]

On two pipeline ranks, one core and one thread each, with a small GPT: time of a step, bytes that a
stage holds (what autograd keeps, counted by hooks on saved tensors, and keys and values with their
gradients), and the engine's own time for a slice (CPU time, on layers that do nothing). With
sleeping layers on 2 to 32 ranks: a step's time over the simulated one, and memory of a rank (its
pages, shared ones divided by those who share them). Exponents say by which power of two a number
grows where the size doubles; what grows faster than it should is flagged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

from about import GIB, write_results
from launching import pin_to_core, result_of

HIDDEN = 64
LAYERS = 2
VOCAB = 256
RANKS = 2
REPEATS = 5
SLICE = 512
SEQUENCES = tuple(2**k for k in range(10, 16))
# With how many tokens slices and micro-batches are counted, and how many of the other there are.
TOKENS = 2048
SLICES = tuple(2**k for k in range(7))
SLICES_OF_MICRO_BATCHES = 4
MICRO_BATCHES = tuple(2**k for k in range(5))
STAGES = (2, 4, 8, 16, 32)
EMULATED_SLICES = 8
EMULATED_MICRO_BATCHES = 2
DILATION = 10.0
# By how much the last doubling may exceed what all of them together may not.
LAST_DOUBLING = 0.15


@dataclass(frozen=True)
class Rule:
    """How fast a number may grow.

    Attributes:
        series: what doubles.
        measure: the number.
        exponent: the most.
        why: in a few words.
    """

    series: str
    measure: str
    exponent: float
    why: str


RULES = (
    Rule("sequence", "step_s", 2.0, "attention is quadratic, the rest is linear"),
    Rule("sequence", "kv_bytes", 1.05, "keys and values are linear"),
    Rule("sequence", "kv_grad_bytes", 1.15, "as keys and values, but for the last slice"),
    Rule("sequence", "activation_bytes", 1.05, "all slices of one micro-batch are in flight"),
    Rule("slices", "engine_us", 0.1, "a slice costs the engine the same, however many there are"),
    Rule("slices", "kv_bytes", 0.05, "the sequence is the same"),
    Rule("slices", "activation_bytes", 0.1, "the sequence is the same"),
    Rule("micro-batches", "step_s", 1.05, "each takes the same time"),
    Rule("micro-batches", "kv_bytes", 0.05, "1f1b holds few micro-batches"),
    Rule("micro-batches", "activation_bytes", 0.05, "1f1b holds few slices"),
    Rule("stages", "over_simulated", 0.05, "messages do not add up"),
    Rule("stages", "rank_gib", 0.05, "a rank knows its neighbours alone"),
)
X = {"sequence": "tokens", "slices": "slices", "micro-batches": "micro-batches", "stages": "stages"}

Point = dict[str, Any]
"""``x``, and the measures by name; those of stages are lists, of which the largest counts."""


def main() -> None:
    args = _arguments()
    if "RANK" in os.environ:
        _rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "points.json"
        series = result_of(__file__, RANKS, out) if set(args.only) - {"stages"} else {}
        if "stages" in args.only:
            series["stages"] = [
                result_of(__file__, stages, out, "--sleeping", quiet=True) for stages in STAGES
            ]
    growths = [asdict(growth) for growth in grown(series)]
    for line in summary(series, growths):
        print(line)
    if args.json is not None:
        write_results(args.json, {"series": series, "growth": growths})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(X), default=tuple(X), metavar="SERIES")
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
    found = _emulated() if args.sleeping else _real(args.only)
    if torch.distributed.get_rank() == 0:
        args.out.write_text(json.dumps(found))


def _real(only: Sequence[str]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    if "sequence" in only:
        series["sequence"] = [
            {"x": tokens, **_measured(tokens, slices=tokens // SLICE, micro_batches=1)}
            for tokens in SEQUENCES
        ]
    if "slices" in only:
        engine_us = _engine_times()
        series["slices"] = [
            {"x": slices, **_measured(TOKENS, slices=slices, micro_batches=1), "engine_us": us}
            for slices, us in zip(SLICES, engine_us, strict=True)
        ]
    if "micro-batches" in only:
        series["micro-batches"] = [
            {"x": count, **_measured(TOKENS, slices=SLICES_OF_MICRO_BATCHES, micro_batches=count)}
            for count in MICRO_BATCHES
        ]
    return series


def _measured(tokens: int, *, slices: int, micro_batches: int) -> dict[str, Any]:
    """A step's time, and what each stage holds in one."""
    import torch
    from competitors import GPT, DeepSpeed
    from held import held_bytes

    model = GPT(hidden=HIDDEN, heads=1, layers=LAYERS, vocab=VOCAB, seq_length=tokens)
    ours = DeepSpeed("ours", model, {"slices": slices})
    ours.prepare(micro_batches)
    data = model.data(micro_batches)
    # Also learns what crosses between the stages, and claims memory.
    with held_bytes(ours.engine) as held:
        ours.step(data)
    seconds = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        start = time.perf_counter()
        ours.step(data)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - start)
    stages: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(stages, held)
    found = {
        "step_s": statistics.median(seconds),
        "seconds": seconds,
        "activation_bytes": [stage.activations for stage in stages],
        "kv_bytes": [stage.kv for stage in stages],
        "kv_grad_bytes": [stage.kv_grads for stage in stages],
    }
    if torch.distributed.get_rank() == 0:
        print(f"{tokens} tokens, {slices} slices, {micro_batches} micro-batches: {found}")
    return found


def _engine_times() -> list[float]:
    from emulate import engine_time
    from sleeping import Dilation, sleeping_data, sleeping_engine

    engine = sleeping_engine({"slices": 1}, Dilation(), micro_batches=1)
    data = sleeping_data(1)
    return [engine_time(engine, data, slices=slices) for slices in SLICES]


def _emulated() -> Point:
    import torch
    from emulate import memory_gib
    from sleeping import SEQ_LENGTH, Dilation, Formula, sleeping_data, sleeping_engine

    from terapipe_ds import SliceScheme
    from terapipe_ds.planner import predict
    from terapipe_ds.runtime.recorder import gather, recorded

    stages = torch.distributed.get_world_size()
    dilation = Dilation()
    block = {"slices": EMULATED_SLICES}
    engine = sleeping_engine(block, dilation, micro_batches=EMULATED_MICRO_BATCHES)
    data = sleeping_data(EMULATED_MICRO_BATCHES)
    engine.train_batch(iter(data))
    dilation.factor = DILATION
    seconds = []
    for _ in range(3):
        torch.distributed.barrier()
        with recorded(engine) as spans:
            engine.train_batch(iter(data))
        first, last = gather(engine, spans).window
        seconds.append(last - first)
    scheme = SliceScheme.even(sequences=1, seq_length=SEQ_LENGTH, count=EMULATED_SLICES)
    simulated = predict(
        Formula(),
        scheme,
        stages=stages,
        schedule="1f1b",
        micro_batches=EMULATED_MICRO_BATCHES,
    )
    step_s = statistics.median(seconds)
    return {
        "x": stages,
        "step_s": step_s,
        "seconds": seconds,
        "over_simulated": step_s / (simulated.makespan_ms * DILATION / 1e3),
        "rank_gib": memory_gib() / stages,
    }


# Growth


@dataclass(frozen=True)
class Growth:
    """How fast a number grew.

    Attributes:
        series: what doubled.
        measure: the number.
        exponent: over all doublings but the first, where there are enough; constants that do not
            grow hide what does at small sizes.
        last: of the last doubling.
        allowed: the most; None where there is no rule.
        why: the rule's reason.
        flagged: whether it grew faster.
    """

    series: str
    measure: str
    exponent: float
    last: float
    allowed: float | None
    why: str
    flagged: bool


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the line through ``(log x, log y)``, by least squares."""
    points = [(log2(x), log2(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def largest(value: Any) -> float:
    """Of a number for each stage the largest."""
    return max(value) if isinstance(value, list) else value


def values(points: Sequence[Point], measure: str) -> tuple[list[float], list[float]]:
    """Sizes and numbers of a series, zeros left out."""
    found = [(point["x"], largest(point[measure])) for point in points]
    kept = [(x, y) for x, y in found if y > 0]
    return [x for x, _ in kept], [y for _, y in kept]


def grown(series: dict[str, list[Point]]) -> Iterator[Growth]:
    """The growth of everything that was measured often enough."""
    rules = {(rule.series, rule.measure): rule for rule in RULES}
    for name, points in series.items():
        for measure in points[0]:
            if measure in ("x", "seconds"):
                continue
            xs, ys = values(points, measure)
            if len(xs) < 2:
                continue
            first = 1 if len(xs) > 3 else 0
            overall = exponent(xs[first:], ys[first:])
            last = exponent(xs[-2:], ys[-2:])
            rule = rules.get((name, measure))
            flagged = rule is not None and (
                overall > rule.exponent or last > rule.exponent + LAST_DOUBLING
            )
            yield Growth(
                name,
                measure,
                overall,
                last,
                None if rule is None else rule.exponent,
                "" if rule is None else rule.why,
                flagged,
            )


def written(measure: str, value: float) -> str:
    """A number with its unit."""
    if measure.endswith("_bytes"):
        return f"{value / 2**20:.2f} MiB"
    if measure.endswith("_gib"):
        return f"{value * GIB / 2**20:.0f} MiB"
    if measure.endswith("_us"):
        return f"{value:.0f} us"
    return f"{value:.3f} s" if measure.endswith("_s") else f"{value:.3f}"


def summary(series: dict[str, list[Point]], growths: Sequence[dict[str, Any]]) -> list[str]:
    """Tables, exponents and flags."""
    lines: list[str] = []
    for name, points in series.items():
        measures = [measure for measure in points[0] if measure not in ("x", "seconds")]
        lines += ["", f"{X[name]:>14}" + "".join(f"{measure:>20}" for measure in measures)]
        for point in points:
            cells = [written(measure, largest(point[measure])) for measure in measures]
            lines.append(f"{point['x']:>14}" + "".join(f"{cell:>20}" for cell in cells))
    lines += ["", f"{'grows with':14}{'what':20}{'exponent':>10}{'last':>8}{'allowed':>9}"]
    for growth in growths:
        allowed = "" if growth["allowed"] is None else f"{growth['allowed']:.2f}"
        lines.append(
            f"{growth['series']:14}{growth['measure']:20}{growth['exponent']:>10.2f}"
            f"{growth['last']:>8.2f}{allowed:>9}{'  TOO FAST' if growth['flagged'] else ''}"
        )
    return lines


if __name__ == "__main__":
    main()
