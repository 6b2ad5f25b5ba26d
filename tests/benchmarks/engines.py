"""What ranks run in the tests of the benchmarks that compare engines."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from terapipe_ds import SliceScheme
from terapipe_ds.planner import Plan, plan
from terapipe_ds.runtime import kv_context
from tests.distributed.workers import initialize_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HIDDEN, LAYERS, TOKENS = 32, 4, 64


class _Counting(list):
    """Counts what has ever been added."""

    added = 0

    def append(self, item: Any) -> None:
        self.added += 1
        super().append(item)


def compare() -> dict[str, Any]:
    """All engines on tiny models: how they differ, what ran, and what ours holds."""
    sys.path.insert(0, str(BENCHMARKS))
    from competitors import GPT, DeepSpeed, Sleeping, Torch, differences, peers
    from held import held_bytes
    from peers import measure
    from sleeping import Dilation, Formula

    initialize_distributed()
    model = GPT(hidden=HIDDEN, heads=2, layers=LAYERS, vocab=64, seq_length=TOKENS)
    sleeping = Sleeping(Dilation(), seq_length=TOKENS)
    block = {"slices": [20, 30, 14]}
    ours = DeepSpeed("ours", model, block)
    split = DeepSpeed("ours, split", model, {**block, "schedule": "zb-h1"})
    others = peers(model)
    engines = [*others, ours, split]
    added = []
    for engine in others:
        if isinstance(engine, Torch):
            engine._owed = _Counting()
            added.append(engine._owed)
    found: dict[str, Any] = {count: differences(engines, model.data(count)) for count in (1, 2, 5)}
    found["put off"] = [owed.added for owed in added]

    def planned(count: int) -> Plan:
        whole = plan(Formula(), seq_length=TOKENS, stages=2, sequences=1, micro_batches=count)
        return replace(whole, scheme=SliceScheme([(1, [40, 8 * count, 8])]), warmup=1)

    slept = [*peers(sleeping), DeepSpeed("ours", sleeping, block, planned)]
    found["sleeping"] = differences(slept, sleeping.data(2))
    found["rows"] = measure(engines, model.data(5), 2)
    found["one micro-batch"] = measure(engines, model.data(1), 1, warm_up=False)
    found["held"] = {}
    for count in (1, 3, 6):
        ours.prepare(count)
        with held_bytes(ours.engine) as held:
            ours.step(model.data(count))
        found["held"][count] = asdict(held)
    kv_context._sum = lambda own, later: own
    found["wrong"] = differences([others[0], ours], model.data(2))
    found["rank"] = torch.distributed.get_rank()
    return found
