"""What ranks run in the tests of ``"slices": "auto"``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)

import terapipe_ds
from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import Plan, planning
from terapipe_ds.runtime import auto as auto_plans
from terapipe_ds.runtime import cost_cache, profiler
from terapipe_ds.runtime.profiler import run_chain
from terapipe_ds.runtime.recorder import recorded

from . import cases, toy
from .behaviour import assert_same, assert_same_gradients, small_gpt
from .features import ALL_BALANCED
from .workers import batches, engine_of, initialize_distributed, keep_gradients

# The few slices that a fit cannot do without are timed; steady numbers are not needed here.
AUTO = {"slices": "auto", "granularity": 4, "profile_budget_s": 0.01, "timeout_s": 60}


def start(cache: Path) -> None:
    os.environ[cost_cache.CACHE_VARIABLE] = str(cache)
    initialize_distributed()


def forced(shape: tuple[int, int], lengths: list[int]) -> None:
    """Makes every plan this one, so that slices are certain on any machine."""
    original = planning.plan

    def plan(*args: Any, **kwargs: Any) -> Plan:
        made = original(*args, **kwargs)
        content = {**made.to_dict(), "scheme": [[shape[0], lengths]], "latency_ms": 1e-3}
        return Plan.from_dict(content)

    auto_plans.plan = plan


def exact(cache: Path, extra: dict[str, Any], dropout: float, experts: bool) -> None:
    """An auto engine trains as one that was given the same slices: bit for bit, dropout included.

    So profiling leaves no trace: not in gradients, optimizers' hooks, random states, or in what
    megatron logs of experts.
    """
    start(cache)
    forced((2, 48), [20, 16, 12])
    found = []
    for block in (AUTO, {"slices": [20, 16, 12], "timeout_s": 60}):
        config = ALL_BALANCED if experts else {}
        engine = engine_of(small_gpt(dropout=dropout, config=dict(config)), 2, block, **extra)
        clear_aux_losses_tracker()
        kept = keep_gradients(engine)
        losses = [engine.train_batch(iter(batches(2, seed=seed))).item() for seed in (1, 3)]
        parameters = [parameter.detach() for parameter in engine.module.parameters()]
        logged = {
            name: record["values"].tolist()
            for name, record in get_moe_layer_wise_logging_tracker().items()
        }
        found.append((losses, kept, parameters, logged))
    (losses, kept, parameters, log), (expected_losses, expected, expected_parameters, other) = found
    assert losses == expected_losses
    assert log == other
    assert experts == any(sum(values) > 0 for values in log.values())
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


def batch_size_changes(cache: Path) -> None:
    """Another number of micro-batches is planned anew, from the costs that are known."""
    start(cache)
    engine = engine_of(small_gpt(), 2, AUTO)
    engine.train_batch(iter(batches(2)))
    timed = count_chains()
    for micro_batches in (4, 1):
        engine.set_train_batch_size(micro_batches * cases.SEQUENCES)
        engine.train_batch(iter(batches(micro_batches)))
        (plan,) = engine.plans.values()
        assert plan.micro_batches == micro_batches
    assert not timed, "the costs were measured again"


def count_chains() -> list[Any]:
    """A list that grows with every chain that is timed from now on."""
    timed: list[Any] = []

    def counted(*args: Any) -> Any:
        timed.append(args)
        return run_chain(*args)

    profiler.run_chain = counted
    return timed


def costs_depend_on(cache: Path) -> None:
    """The cache's key tells models apart that look alike, and is the same in every process."""
    start(cache)

    def key(**build: Any) -> Any:
        return cost_cache.about(engine_of(small_gpt(**build), 1, AUTO), (2, 48))

    plain = key()
    assert key() == plain
    assert " at 0x" not in str(plain)
    for other in (
        {"config": {"window_size": (3, 0)}},
        {"attention_dropout": 0.1},
        {"config": {"recompute_granularity": "selective"}},
        {"config": {"num_query_groups": 2}},
        {"activation_checkpoint_interval": 1},
    ):
        assert key(**other) != plain, other


class Counting(torch.nn.Module):
    """Counts its tokens in a buffer, and works on its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[b, l, 8]`` to the same."""
        self.tokens += hidden.shape[0] * hidden.shape[1]
        return hidden.mul_(2) * self.weight


def buffers_and_work_in_place(cache: Path) -> None:
    """Profiling leaves buffers as they were, and runs layers that work in place."""
    start(cache)
    stages = torch.distributed.get_world_size()
    data = [(torch.randn(2, 48, 8), torch.randn(2, 48, 8))]
    found = []
    for block in (AUTO, {"slices": 3}):
        module = PipelineModule(
            [LayerSpec(Counting) for _ in range(stages)],
            num_stages=stages,
            loss_fn=torch.nn.functional.mse_loss,
            partition_method="uniform",
        )
        token = terapipe_ds.TensorDims(batch=0, sequence=1)
        module.token_slice_adapter = terapipe_ds.SequenceAdapter(
            (token,), (token,), (token,), token, mean_over_valid_tokens=True
        )
        engine = engine_of(module, 1, block)
        loss = engine.train_batch(iter(data)).item()
        found.append([loss, *(buffer.item() for buffer in module.buffers())])
    assert_same(found[0], found[1], "loss or buffer")
    assert found[0][1] == 96


def odd_lengths_under_sequence_parallelism(cache: Path) -> None:
    """A length that ranks cannot share is one error on all of them, and training can go on."""
    start(cache)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    config = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    engine = engine_of(small_gpt(topology=topology, config=config), 1, AUTO)
    for length in (47, 5):
        try:
            engine.train_batch(iter(batches(1, length=length)))
        except ConfigError as error:
            assert "multiples of 2" in str(error), error
        else:
            raise AssertionError(f"{length} tokens were shared by 2 ranks")
    engine.train_batch(iter(batches(1)))
    assert set(engine.plans) == {(2, 48)}


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

    os.environ[cost_cache.CACHE_VARIABLE] = f"{cache}-other"
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

    slack = engine_of(small_gpt(), 1, {**AUTO, "warmup": 2})
    slack.load_checkpoint(str(saved))
    slack.train_batch(iter(batches(1, seed=5)))
    assert slack.plans[2, 48].warmup == 2, "the checkpoint's plan has no slack"

    auto_plans.plan = lambda *_, **__: Plan.from_dict(
        {**plan.to_dict(), "scheme": [[1, [24, 24]], [1, [24, 24]]]}
    )
    groups = engine_of(small_gpt(), 1, {**AUTO, "replan": True})
    groups.train_batch(iter(batches(1)))
    groups.save_checkpoint(f"{saved}-groups")
    forced((2, 48), [24, 24])
    whole = engine_of(small_gpt(), 1, {**AUTO, "loss": "whole_sequence"})
    whole.load_checkpoint(f"{saved}-groups")
    assert not whole.plans, "a plan of groups for a loss of the whole sequence"

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


def run_with_slack() -> list[list[str]]:
    """What this stage ran in a step: without slack, and with one more slice."""
    initialize_distributed()
    ran = []
    for warmup in (0, 1):
        engine = engine_of(small_gpt(), 2, {"slices": 2, "warmup": warmup, "timeout_s": 60})
        with recorded(engine) as spans:
            engine.train_batch(iter(batches(2)))
        ran.append([f"{s.what}{s.micro_batch}.{s.slice}" for s in spans if s.what in ("F", "B")])
    return ran
