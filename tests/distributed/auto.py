"""What ranks run in the tests of ``"slices": "auto"``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import Plan
from terapipe_ds.runtime import auto as auto_plans
from terapipe_ds.runtime import profiler
from terapipe_ds.runtime.profiler import run_chain

from . import toy
from .behaviour import assert_same, assert_same_gradients, small_gpt
from .workers import batches, engine_of, initialize_distributed, keep_gradients

# The few slices that a fit cannot do without are timed; steady numbers are not needed here.
AUTO = {"slices": "auto", "granularity": 4, "profile_budget_s": 0.01, "timeout_s": 60}


def start(cache: Path) -> None:
    os.environ[auto_plans.CACHE_VARIABLE] = str(cache)
    initialize_distributed()


def forced(shape: tuple[int, int], lengths: list[int]) -> None:
    """Makes every plan this one, so that slices are certain on any machine."""
    original = auto_plans.plan

    def plan(*args: Any, **kwargs: Any) -> Plan:
        made = original(*args, **kwargs)
        content = {**made.to_dict(), "scheme": [[shape[0], lengths]], "latency_ms": 1e-3}
        return Plan.from_dict(content)

    auto_plans.plan = plan


def exact(cache: Path, extra: dict[str, Any], dropout: float) -> None:
    """An auto engine trains as one that was given the same slices: bit for bit, dropout included.

    So profiling leaves no trace: not in gradients, optimizers' hooks or random states.
    """
    start(cache)
    forced((2, 48), [20, 16, 12])
    found = []
    for block in (AUTO, {"slices": [20, 16, 12], "timeout_s": 60}):
        engine = engine_of(small_gpt(dropout=dropout), 2, block, **extra)
        kept = keep_gradients(engine)
        losses = [engine.train_batch(iter(batches(2, seed=seed))).item() for seed in (1, 3)]
        parameters = [parameter.detach() for parameter in engine.module.parameters()]
        found.append((losses, kept, parameters))
    (losses, kept, parameters), (expected_losses, expected, expected_parameters) = found
    assert losses == expected_losses
    for mine, theirs in zip(kept, expected, strict=True):
        # ZeRO-1 keeps gradients in buffers of its own: parameters must do there.
        if theirs:
            assert_same_gradients(mine, theirs, tolerance=0.0)
    assert_same(parameters, expected_parameters, "parameter", tolerance=0.0)


def plans_agree(cache: Path) -> str:
    """Every rank has the plan, and a second engine takes the costs from the cache."""
    start(cache)
    engine = engine_of(small_gpt(), 2, AUTO)
    engine.train_batch(iter(batches(2)))
    (plan,) = engine.plans.values()
    assert (engine.global_rank == 0) == bool(engine.costs)
    assert plan.unsliced.latency_ms >= plan.latency_ms
    assert plan.stages == engine.num_stages
    assert plan.micro_batches == 2
    timed = count_chains()
    again = engine_of(small_gpt(), 2, AUTO)
    again.train_batch(iter(batches(2)))
    assert not timed, "the cache was not used"
    other = engine_of(small_gpt(layers=2 * engine.num_stages + 1), 2, AUTO)
    other.train_batch(iter(batches(2)))
    assert timed, "another model took the cached costs"
    return str(plan.scheme)


def count_chains() -> list[Any]:
    """A list that grows with every chain that is timed from now on."""
    timed: list[Any] = []

    def counted(*args: Any) -> Any:
        timed.append(args)
        return run_chain(*args)

    profiler.run_chain = counted
    return timed


def broken_cache(cache: Path) -> None:
    """A cache file that cannot be read is measured again, on all ranks."""
    start(cache)
    engine_of(small_gpt(), 1, AUTO).train_batch(iter(batches(1)))
    torch.distributed.barrier()
    for path in cache.glob("*.json"):
        path.write_text("{")
    torch.distributed.barrier()
    timed = count_chains()
    engine_of(small_gpt(), 1, AUTO).train_batch(iter(batches(1)))
    assert timed


def unwritable_cache(cache: Path) -> None:
    """Without a folder to write to, training goes on."""
    cache.write_text("a file where the folder should be")
    start(cache)
    engine_of(small_gpt(), 1, AUTO).train_batch(iter(batches(1)))


def new_shapes(cache: Path) -> None:
    """Each shape gets a plan; shorter ones need no new measurement."""
    start(cache)
    engine = engine_of(small_gpt(), 2, AUTO)
    engine.eval_batch(iter(batches(2)))  # before there is any plan
    assert not engine.plans
    engine.train_batch(iter(batches(2)))
    timed = count_chains()
    engine.train_batch(iter([*batches(1, length=40), *batches(1, length=33)]))
    assert not timed
    engine.train_batch(iter(batches(2, sequences=3)))
    assert timed
    del timed[:]
    engine.train_batch(iter(batches(2, length=2)))
    engine.train_batch(iter(batches(2)))
    assert not timed
    assert set(engine.plans) == {(2, 48), (2, 40), (2, 33), (3, 48), (2, 2)}
    engine.eval_batch(iter(batches(2, length=17)))


def whole_sequence_loss(cache: Path) -> None:
    """Without a loss that adds up over slices, a micro-batch stays one group."""
    start(cache)
    forced((2, 48), [24, 24])
    engine = engine_of(small_gpt(), 2, {**AUTO, "loss": "whole_sequence"})
    stock = engine_of(small_gpt(), 2)
    for seed in (1, 2):
        found = engine.train_batch(iter(batches(2, seed=seed)))
        expected = stock.train_batch(iter(batches(2, seed=seed)))
        assert_same([found], [expected], "loss")


def several_tensors(cache: Path) -> None:
    """A module with constants and integers between its stages is profiled too."""
    start(cache)
    stages = torch.distributed.get_world_size()
    engines = [
        engine_of(toy.toy_pipeline(stages, ties=stages > 1), 2, block)
        for block in ({**AUTO, "granularity": 2}, {"slices": 3})
    ]
    for _ in range(2):
        found, expected = (engine.train_batch(iter(toy.toy_batches(2))) for engine in engines)
        assert_same([found], [expected], "loss")


def nothing_fits(cache: Path) -> None:
    """No plan fits in memory: one line on every rank."""
    start(cache)
    engine = engine_of(small_gpt(), 1, {**AUTO, "memory_gib": 1e-6})
    try:
        engine.train_batch(iter(batches(1)))
    except ConfigError as error:
        assert "no plan that fits" in str(error), error
        assert "\n" not in str(error)
        return
    raise AssertionError("a plan fits in a kilobyte")


def checkpoint(cache: Path, saved: Path) -> None:
    """A plan is saved and used on resume, without measuring; ``replan`` makes another."""
    start(cache)
    forced((2, 48), [20, 16, 12])
    engine = engine_of(small_gpt(), 1, AUTO)
    engine.train_batch(iter(batches(1)))
    engine.save_checkpoint(str(saved), client_state={"step": 7})
    (plan,) = engine.plans.values()
    expected = engine.train_batch(iter(batches(1, seed=5)))

    os.environ[auto_plans.CACHE_VARIABLE] = f"{cache}-other"
    forced((2, 48), [24, 24])
    timed = count_chains()
    resumed = engine_of(small_gpt(), 1, AUTO)
    _, client_state = resumed.load_checkpoint(str(saved))
    assert client_state["step"] == 7
    assert auto_plans.CHECKPOINT_KEY not in client_state
    found = resumed.train_batch(iter(batches(1, seed=5)))
    assert not timed
    assert resumed.plans == {(2, 48): plan}
    assert found.item() == expected.item()

    anew = engine_of(small_gpt(), 1, {**AUTO, "replan": True})
    anew.load_checkpoint(str(saved))
    anew.train_batch(iter(batches(1, seed=5)))
    assert timed
    assert anew.plans[2, 48].scheme.slices == [2]

    stale = engine_of(small_gpt(), 1, {**AUTO, "schedule": "gpipe"})
    stale.load_checkpoint(str(saved))
    stale.train_batch(iter(batches(1, seed=5)))
    assert stale.plans[2, 48].schedule == "gpipe"

    explicit = engine_of(small_gpt(), 1, {"slices": 3})
    _, client_state = explicit.load_checkpoint(str(saved))
    assert auto_plans.CHECKPOINT_KEY not in client_state


def two_pipelines(cache: Path) -> str:
    """Data-parallel pipelines with different lengths in one step plan together."""
    start(cache)
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    engine = engine_of(small_gpt(topology=topology), 1, AUTO)
    replica = topology.get_coord(torch.distributed.get_rank()).data
    engine.train_batch(iter(batches(1, length=(48, 36)[replica])))
    engine.train_batch(iter(batches(1, length=(36, 48)[replica])))
    assert set(engine.plans) == {(2, 48), (2, 36)}
    return str({shape: str(plan.scheme) for shape, plan in engine.plans.items()})
