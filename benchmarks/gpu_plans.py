"""Part 4 of ``gpu_profile.py``: plans for a pipeline of the layers measured, beside no slicing."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from gpu_common import Row
from gpu_sizes import Size

from terapipe_ds.planner import CostModel, Fit, StageCost, StageMemory, plan, predict


def make_plans(cost: CostModel, size: Size, deadline: float, out: Path) -> list[Row]:
    """Plans for both schedules and both objectives, beside no slicing.

    Only groups of one sequence: that is what was measured.
    """
    stage_cost = of_layers(cost, size.layers_per_stage)
    name = cost.about["name"]
    rows = []
    for schedule, objective in product(("gpipe", "1f1b"), ("paper", "simulate")):
        if time.monotonic() > deadline:
            print(f"\nplan for {schedule}, {objective}: left out for lack of time")
            continue
        found = plan(
            stage_cost,
            seq_length=size.seq_length,
            stages=size.stages,
            sequences=size.sequences,
            granularity=size.granularity,
            objective=objective,
            schedule=schedule,
            group_sizes=(1,),
        )
        path = out / f"plan-{name}-{objective}-{schedule}.json"
        found.save(path)
        step = {"stages": size.stages, "schedule": schedule}
        simulated, unsliced = (
            predict(stage_cost, scheme, **step).makespan_ms
            for scheme in (found.scheme, found.unsliced.scheme)
        )
        rows.append(
            {
                "file": path.name,
                "schedule": schedule,
                "objective": objective,
                "stages": size.stages,
                "scheme": str(found.scheme),
                "slices": found.scheme.slices,
                "latency_ms": found.latency_ms,
                "unsliced_ms": found.unsliced.latency_ms,
                "speedup": found.speedup,
                "simulated_ms": simulated,
                "simulated_unsliced_ms": unsliced,
            }
        )
    return rows


def of_layers(cost: CostModel, layers: int) -> CostModel:
    """The costs of a stage of so many layers, from those of one.

    A little too high for short slices: each measured time holds one wait for the device.
    """
    (one,) = cost.stages
    memory = one.memory and StageMemory(**{k: layers * v for k, v in asdict(one.memory).items()})
    stage = StageCost(
        name=f"{layers} layers",
        forward=_fit_of_layers(one.forward, layers),
        backward=_fit_of_layers(one.backward, layers),
        error=one.error,
        errors=one.errors,
        memory=memory,
    )
    return replace(cost, stages=(stage,), about={**cost.about, "layers": layers})


def _fit_of_layers(fit: Fit, layers: int) -> Fit:
    a0, a1 = fit.jump
    return replace(
        fit,
        base_ms=tuple(layers * ms for ms in fit.base_ms),
        jump=(layers * a0, layers * a1),
        price_ms=tuple(layers * ms for ms in fit.price_ms),
        least_ms=layers * fit.least_ms,
    )


def print_plans(rows: list[Row]) -> None:
    if not rows:
        return
    print(f"\nPlans for {rows[0]['stages']} stages, in ms of a step (no communication)")
    print(f"  {'schedule':9}{'objective':10}{'no slices':>10}{'plan':>9}{'faster':>8}  scheme")
    for row in rows:
        times = f"{row['unsliced_ms']:>10.1f}{row['latency_ms']:>9.1f}{row['speedup']:>7.2f}x"
        print(f"  {row['schedule']:9}{row['objective']:10}{times}  {row['scheme']}")
