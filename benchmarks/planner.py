"""The solver on the paper's settings, on random ones and on long sequences: exact, and how fast.

    python benchmarks/planner.py [--json FILE]

Costs are synthetic, like a V100's: arithmetic at a fixed rate with a floor for few tokens, a fixed
time per layer, all-reduces for tensor parallelism. Every result is proved on the spot: for each
limit on the largest slice time that the solver looked at, a separate plain dynamic program
recomputes the smallest sum, and the limits together must leave no room for a better plan. Small
random problems are compared with all possible schemes. Times are medians on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from terapipe_ds.files import write_text
from terapipe_ds.planner.dp import Optimum, solve

TABLES = Path(__file__).resolve().parents[1] / "configs" / "paper_tables.json"
RANDOM = 13
SEED = 1234
FEW_SEQUENCES = 8
LIMIT_FEW_S = 1.0
LIMIT_OTHERS_S = 5.0

# A V100, roughly: arithmetic in 16 bit, NVLink, and what launching a layer's kernels takes.
FLOPS_PER_MS = 60e9
BYTES_PER_MS = 60e6
FIXED_MS = 0.6
FLOOR_TOKENS = 128


@dataclass(frozen=True)
class V100Like:
    """Forward and backward of a slice on one stage."""

    layers: float
    hidden: int
    tensor_parallel: int

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        length, context = np.asarray(length, float), np.asarray(context, float)
        tokens = length * sequences
        h, tp = self.hidden, self.tensor_parallel
        products = 3 * 24 * h * h * np.maximum(tokens, FLOOR_TOKENS)
        attention = 3 * 4 * h * tokens * (context + length / 2)
        reduced = 0.0 if tp == 1 else 4 * 2 * 2 * tokens * h * (tp - 1) / tp / BYTES_PER_MS
        return self.layers * (FIXED_MS + (products + attention) / tp / FLOPS_PER_MS + reduced)


@dataclass(frozen=True)
class Table:
    """Random times, monotone in nothing."""

    times: Any

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        return self.times[sequences, length, context]


@dataclass(frozen=True)
class Problem:
    """One thing to plan."""

    name: str
    cost: Any
    seq_length: int
    stages: int
    sequences: int
    granularity: int
    limit_s: float

    def solve(self) -> Optimum:
        return solve(
            self.cost,
            seq_length=self.seq_length,
            stages=self.stages,
            sequences=self.sequences,
            granularity=self.granularity,
        )


def main() -> None:
    args = _arguments()
    # One core, whatever threads numpy has: they share it.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [_row(problem, args.repeats) for problem in _problems()]
    small = _small_problems(args.small)
    failed = [row["name"] for row in rows if not (row["in_time"] and row["proved"])]
    print(f"\n{small} small random problems: equal to the best of all schemes")
    print(f"targets: {'met' if not failed else 'missed by ' + ', '.join(failed)}")
    if args.json is not None:
        write_text(args.json, json.dumps(rows, indent=1) + "\n")
    sys.exit(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each problem")
    parser.add_argument("--small", type=int, default=300, help="problems to try all schemes of")
    return parser.parse_args()


def _problems() -> Iterator[Problem]:
    tables = json.loads(TABLES.read_text())
    for row in tables["overall"]:
        sequences = row["batch_size"] // row["data_parallel"]
        yield _paper_problem(f"setting {row['setting']}, {row['model']}", row, row, sequences)
    longer = tables["sequence_length"]
    for row in longer["rows"]:
        name = f"{longer['model']}, {row['seq_length']} tokens"
        yield _paper_problem(name, longer, row, row["batch_size"])
    rng = np.random.default_rng(SEED)
    for number in range(RANDOM):
        sequences = int(rng.choice([1, 2, 3, 4, 8, 12, 16, 32]))
        seq_length = 8 * int(rng.integers(64, 257))
        cost = V100Like(
            layers=float(rng.uniform(0.5, 8)),
            hidden=int(rng.choice([1024, 2048, 4096, 8192, 12288])),
            tensor_parallel=int(rng.choice([1, 2, 4, 8])),
        )
        stages = int(rng.integers(2, 97))
        limit = LIMIT_FEW_S if sequences <= FEW_SEQUENCES else LIMIT_OTHERS_S
        yield Problem(f"random {number + 1}", cost, seq_length, stages, sequences, 8, limit)
    cost = V100Like(layers=2, hidden=12288, tensor_parallel=8)
    yield Problem("131072 tokens", cost, 131_072, 48, 1, 128, LIMIT_OTHERS_S)


def _paper_problem(name: str, model: Any, row: Any, sequences: int) -> Problem:
    stages = model["pipeline_stages"]
    cost = V100Like(model["layers"] / stages, model["hidden"], model["tensor_parallel"])
    limit = LIMIT_FEW_S if sequences <= FEW_SEQUENCES else LIMIT_OTHERS_S
    return Problem(name, cost, row["seq_length"], stages, sequences, 8, limit)


def _row(problem: Problem, repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = problem.solve()
        seconds.append(time.perf_counter() - start)
    row = {
        "name": problem.name,
        "seq_length": problem.seq_length,
        "stages": problem.stages,
        "sequences": problem.sequences,
        "granularity": problem.granularity,
        "solve_s": statistics.median(seconds),
        "latency_ms": found.latency_ms,
        "limits": len(found.proof),
        "proved": _proved(problem, found),
        "scheme": str(found.scheme),
    }
    row["in_time"] = row["solve_s"] < problem.limit_s
    print(
        f"{row['name']:24} {problem.sequences:>3} x {problem.seq_length:>6} tokens, "
        f"{problem.stages:>2} stages: {row['solve_s']:.3f} s (limit {problem.limit_s:g}), "
        f"{row['limits']:>3} limits, {'proved' if row['proved'] else 'NOT PROVED'}, "
        f"{row['latency_ms']:.1f} ms, {row['scheme'][:60]}",
        flush=True,
    )
    return row


def _proved(problem: Problem, found: Optimum) -> bool:
    """Whether the solver's limits leave no room for a plan better than the one found."""
    positions = [*range(0, problem.seq_length, problem.granularity), problem.seq_length]
    tables = [_plain_table(problem.cost, positions, b + 1) for b in range(problem.sequences)]
    fastest = min(float(table.min()) for table in tables)
    slack = 1e-9 * found.latency_ms
    # Plans whose largest slice takes this long or longer are known to be no better.
    covered = math.inf
    for limit, total, down_to in sorted(found.proof, reverse=True):
        if limit < covered:
            return False
        checked = _smallest_sum(tables, limit)
        if not math.isclose(checked, total, rel_tol=1e-9):
            return False
        if total < math.inf and total + (problem.stages - 1) * down_to < found.latency_ms - slack:
            return False
        covered = min(covered, down_to if total < math.inf else -math.inf)
    return covered <= fastest


def _plain_table(cost: Any, positions: list[int], sequences: int) -> Any:
    table = np.full((len(positions), len(positions)), math.inf)
    for j in range(1, len(positions)):
        starts = np.array(positions[:j])
        table[j, :j] = cost.time(positions[j] - starts, starts, sequences)
    return table


def _smallest_sum(tables: list[Any], limit: float) -> float:
    """Over all ways to cover the sequences, all slices below the limit; one row after another."""
    groups = []
    for table in tables:
        sums = np.zeros(len(table))
        for j in range(1, len(table)):
            row = table[j, :j]
            allowed = row < limit
            sums[j] = (row[allowed] + sums[:j][allowed]).min() if allowed.any() else math.inf
        groups.append(float(sums[-1]))
    best = [0.0]
    for n in range(1, len(tables) + 1):
        best.append(min(groups[b - 1] + best[n - b] for b in range(1, n + 1)))
    return best[-1]


def _small_problems(count: int) -> int:
    """Compares with all schemes; raises where the solver's is not the best."""
    rng = np.random.default_rng(SEED)
    for _ in range(count):
        length, sequences, stages = (int(rng.integers(1, high)) for high in (7, 4, 9))
        times = rng.random((sequences + 1, length + 1, length + 1))
        found = solve(
            Table(times), seq_length=length, stages=stages, sequences=sequences, granularity=1
        )
        best = min(_latency(times, scheme, stages) for scheme in _all_schemes(length, sequences))
        assert math.isclose(found.latency_ms, best, rel_tol=1e-12), (found, best)
        mine = _latency(times, list(found.scheme), stages)
        assert math.isclose(mine, best, rel_tol=1e-12), (found, best)
    return count


def _latency(times: Any, scheme: Any, stages: int) -> float:
    each = [
        times[b, length, start]
        for b, lengths in scheme
        for length, start in zip(lengths, np.cumsum([0, *lengths[:-1]]), strict=True)
    ]
    return math.fsum(each) + (stages - 1) * max(each)


def _all_schemes(length: int, sequences: int) -> Iterator[Any]:
    cuts = list(_compositions(length))
    for sizes in _partitions(sequences, sequences):
        for chosen in itertools.product(cuts, repeat=len(sizes)):
            yield list(zip(sizes, chosen, strict=True))


def _compositions(n: int) -> Iterator[list[int]]:
    if n == 0:
        yield []
    for first in range(1, n + 1):
        for rest in _compositions(n - first):
            yield [first, *rest]


def _partitions(n: int, most: int) -> Iterator[list[int]]:
    if n == 0:
        yield []
    for first in range(min(n, most), 0, -1):
        for rest in _partitions(n - first, first):
            yield [first, *rest]


if __name__ == "__main__":
    main()
