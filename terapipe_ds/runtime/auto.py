"""``"slices": "auto"``: profiles the user's own stages in place, plans, and makes all ranks agree.

This happens in the first training step that brings a new shape of micro-batches, when the real
inputs are there and nothing of the step has been computed. The measured costs are cached on disk
under a key of everything that they depend on; the plans go into checkpoints, since another plan is
another order of summation.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ..errors import ConfigError, TeraPipeError
from ..planner.cost import CostModel, StageCost, Transfer
from ..planner.fit import fit_stage
from ..planner.memory import GIB, StageMemory, optimizer_bytes
from ..planner.planning import Candidate, Plan, plan
from ..schedule.order import Action, splits_backward
from ..scheme import SliceScheme, TokenRange
from .adapter import Dims, TensorDims, Tensors, as_tuple, cloned
from .boundary import TensorTemplate
from .channel import measure_round_trips
from .cost_cache import about, cache_path, log, read_cache, write_cache
from .deepspeed_seams import autocast_if_enabled, without_gradient_hooks
from .header import BatchShape
from .loss import MicroBatchLoss
from .profiler import Measurements, StageUnderTest, chains, held_bytes, measure
from .step import StepState
from .watchdog import Wait

if TYPE_CHECKING:
    from .engine import TokenSliceEngine

CHECKPOINT_KEY = "terapipe_ds"

# A profile serves sequences up to this much longer than it has seen, so that lengths which grow
# from step to step are profiled again a few times, not each time.
_REACH = 1.5
# A plan has to be thought faster than no slices by this share: the costs are no better known.
_WORTHWHILE = 0.01
# The share of a GPU's memory that a plan may fill.
_USABLE_MEMORY = 0.9


class AutoPlans:
    """The plans of an engine's micro-batch shapes.

    Args:
        engine: the engine, set up but for its first step.
    """

    def __init__(self, engine: TokenSliceEngine) -> None:
        self._engine = engine
        self.plans: dict[BatchShape, Plan] = {}
        """For each (sequences, tokens) of a loaded micro-batch its plan."""
        # Sequences of a micro-batch -> tokens that its profile covers, on every rank; the costs
        # themselves are needed where the plan is made, on rank 0.
        self._covered: dict[int, float] = {}
        self.costs: dict[int, CostModel] = {}

    def unknown(self, shapes: Sequence[BatchShape]) -> bool:
        """Whether a training step with these micro-batches needs a new plan."""
        return not all(self._is_planned(shape) for shape in shapes)

    def _is_planned(self, shape: BatchShape) -> bool:
        """Whether there is a plan for as many micro-batches as a step has now."""
        found = self.plans.get(shape)
        return found is not None and found.micro_batches == self._engine.micro_batches

    def scheme(self, shape: BatchShape) -> SliceScheme:
        """How a micro-batch is cut; an even guess where there is no plan (evaluation alone)."""
        return self.plans[shape].scheme if shape in self.plans else self.guess(shape)

    def guess(self, shape: BatchShape) -> SliceScheme:
        """Even slices, enough of them to fill the pipeline."""
        sequences, tokens = shape
        engine = self._engine
        unit = self._granularity
        count = min(4 * engine.num_stages, max(1, tokens // unit))
        return SliceScheme.even(sequences=sequences, seq_length=tokens, count=count, unit=unit)

    @property
    def _granularity(self) -> int:
        """What planned lengths are multiples of: as the block asks, and as the model needs."""
        return math.lcm(self._engine.terapipe.granularity, self._engine._adapter.multiple_of)

    @property
    def _one_group(self) -> bool:
        """Whether all sequences of a micro-batch have to go together."""
        engine = self._engine
        return engine._loss_mode != "per_slice" or engine._adapter.balances_micro_batch

    def make(
        self, shapes: Sequence[BatchShape], inputs: list[Tensors], labels: list[Tensors]
    ) -> None:
        """Plans what is unknown anywhere; all ranks of all pipelines call it together.

        Args:
            shapes: of this pipeline's micro-batches.
            inputs: what the first stage has loaded.
            labels: what the last stage has loaded.

        Raises:
            ConfigError: on all ranks, if there is no plan.
        """
        missing = {shape for shape in shapes if not self._is_planned(shape)}
        for shape in sorted(set().union(*self._everywhere(missing))):
            # A pipeline that has no micro-batch of this shape makes one of another.
            index = shapes.index(shape) if shape in shapes else 0
            self._make(shape, inputs[index : index + 1], labels[index : index + 1])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"plans": [[list(shape), plan.to_dict()] for shape, plan in self.plans.items()]}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Takes the plans of a checkpoint, unless ``"replan"`` is set or they no longer fit."""
        if state is None or self._engine.terapipe.replan:
            return
        plans = {
            (int(sequences), int(tokens)): Plan.from_dict(content, where="the checkpoint")
            for (sequences, tokens), content in state["plans"]
        }
        stale = [reason for found in plans.values() for reason in self._stale(found)]
        if stale:
            log(f"the checkpoint's plan does not fit this run ({stale[0]}): planning again")
            return
        self.plans = plans

    def _stale(self, found: Plan) -> Iterator[str]:
        """Why a plan from a checkpoint cannot be used."""
        engine = self._engine
        if (found.stages, found.schedule) != (engine.num_stages, engine.terapipe.schedule):
            yield f"it is for {found.stages} stages and {found.schedule}"
        if engine.terapipe.warmup not in ("auto", found.warmup):
            yield f"it is for a warmup of {found.warmup}"
        if found.micro_batches != engine.micro_batches:
            yield f"it is for {found.micro_batches} micro-batches a step"
        if self._one_group and len(found.scheme) > 1:
            yield "it has several groups, this run a loss of the whole micro-batch"
        unit = engine._adapter.multiple_of
        if any(length % unit for group in found.scheme.groups for length in group.lengths):
            yield f"its slices are not multiples of {unit}"

    def _make(self, shape: BatchShape, inputs: list[Tensors], labels: list[Tensors]) -> None:
        engine = self._engine
        sequences, tokens = shape
        if tokens < 2 * self._granularity:
            self.plans[shape] = self._whole(shape)
            return
        found = None
        if self._covered.get(sequences, 0) < tokens:
            found = self._profile(shape, inputs, labels)
            self._covered[sequences] = _REACH * tokens
        result: list[Any] = [None]
        if engine.global_rank == 0:
            if found is not None:
                self.costs[sequences] = found
            result = [_attempt(lambda: self._plan(shape))]
        with engine._watchdog.waiting(Wait("the plan", "rank 0")):
            dist.broadcast_object_list(result, src=0)
        if isinstance(result[0], str):
            raise ConfigError(result[0])
        self.plans[shape] = Plan.from_dict(result[0])
        log(_describe(self.plans[shape], shape))

    def _whole(self, shape: BatchShape) -> Plan:
        """No slices, for sequences that are too short to be cut."""
        engine = self._engine
        sequences, tokens = shape
        scheme = SliceScheme([(sequences, [tokens])])
        return Plan(
            scheme=scheme,
            latency_ms=0.0,
            objective="simulate",
            schedule=engine.terapipe.schedule,
            stages=engine.num_stages,
            micro_batches=engine.micro_batches,
            granularity=self._granularity,
            unsliced=Candidate(scheme, 0.0),
            warmup=engine.terapipe.given_warmup,
        )

    def _plan(self, shape: BatchShape) -> dict[str, Any]:
        engine = self._engine
        sequences, tokens = shape
        # Lengths beyond the measured ones, within reach.
        cost = self.costs[sequences]
        cost = dataclasses.replace(cost, seq_length=max(tokens, cost.seq_length))
        chosen = plan(
            cost,
            seq_length=tokens,
            stages=engine.num_stages,
            sequences=sequences,
            granularity=self._granularity,
            objective="simulate",
            schedule=engine.terapipe.schedule,
            micro_batches=engine.micro_batches,
            memory_bytes=_memory_limit(engine),
            # A loss of the whole sequence cannot be computed before all groups are through.
            group_sizes=[sequences] if self._one_group else None,
            least_gain=_WORTHWHILE,
            warmup=engine.terapipe.warmup,
        )
        return chosen.to_dict()

    def _profile(
        self, shape: BatchShape, inputs: list[Tensors], labels: list[Tensors]
    ) -> CostModel | None:
        """The costs of this pipeline's stages, from the cache or measured; None but on rank 0."""
        engine = self._engine
        mine = about(engine, shape)
        stages = self._over_stages(mine)
        cache = cache_path(stages)
        cached: list[Any] = [None]
        if engine.global_rank == 0:
            cached = [read_cache(cache)]
        with engine._watchdog.waiting(Wait("the cached costs", "rank 0")):
            dist.broadcast_object_list(cached, src=0)
        if cached[0] is not None:
            log(f"using the costs measured before, {cache}")
            return CostModel.from_dict(cached[0]) if engine.global_rank == 0 else None
        log(
            f"measuring every stage for up to {engine.terapipe.profile_budget_s:g} s "
            f"(terapipe.profile_budget_s); the result is kept in {cache}"
        )
        started = time.monotonic()
        mine = self._measure(shape, inputs, labels)
        costs: list[StageCost] = self._over_stages(mine)
        model = CostModel(
            stages=tuple(costs),
            seq_length=shape[1],
            transfer=self._transfer(shape),
            about=stages[0],
        )
        if engine.global_rank == 0:
            write_cache(cache, model)
        worst = max(cost.error or 0.0 for cost in costs)
        log(
            f"measured in {time.monotonic() - started:.0f} s; the model is off by {worst:.1%} on "
            "slices that it has not seen (median, worst stage)"
        )
        return model

    def _measure(
        self, shape: BatchShape, inputs: list[Tensors], labels: list[Tensors]
    ) -> StageCost:
        engine = self._engine
        sequences, tokens = shape
        granularity = self._granularity
        sizes = [sequences] if self._one_group else _group_sizes(sequences)
        found = Measurements(chains(tokens, sequences=sizes, granularity=granularity))
        with _undisturbed(engine):
            received = self._probe(shape, inputs)
            stage = _stage_under_test(engine, inputs, labels, received)
            measure(
                stage,
                found,
                budget_s=engine.terapipe.profile_budget_s,
                any_rank=self._any_rank,
            )
            held = held_bytes(stage, sequences=sequences, tokens=_half(tokens, granularity))
        return fit_stage(
            f"stage {engine.stage_id}",
            found.samples(),
            memory=StageMemory(
                **_training_state(engine),
                activation_per_token=held.activations,
                kv_per_token=held.kv,
            ),
        )

    def _probe(self, shape: BatchShape, inputs: list[Tensors]) -> tuple[Tensor, ...] | None:
        """Sends a micro-batch forward through the pipeline; returns what this stage received.

        So every stage learns what crosses between stages, and has real tensors to compute on. In
        slices, each dropped when it is sent: the whole sequence's activations might not fit.
        """
        engine = self._engine
        scheme = self.guess(shape)
        tiled = [_tile(engine._adapter.inputs, inputs[0], shape)] if inputs else []
        engine._step = StepState(training=True, schemes=[scheme], inputs=tiled, losses=[])
        group = engine._step.groups[0]
        received: list[tuple[Tensor, ...]] = []
        try:
            engine._begin_receives([Action("F", 0, index) for index in range(len(group.ranges))])
            for index in range(len(group.ranges)):
                if not engine.is_first_stage():
                    engine._exec_recv_activation(0, index)
                    received.append(as_tuple(group.inputs[index]))
                if not engine.is_last_stage():
                    engine._exec_forward(0, index)
                    engine._exec_send_activation(0, index)
                    group.outputs.clear()
                group.inputs.clear()
            if not engine.is_last_stage():
                engine._activations_out.drain()
        finally:
            engine._step.release()
            engine._step = None
        if not received:
            return None
        return tuple(
            slices[0].detach()
            if dim is None
            else torch.cat([tensor.detach() for tensor in slices], dim.sequence)
            for slices, dim in zip(
                zip(*received, strict=True), engine._adapter.boundary, strict=True
            )
        )

    def _transfer(self, shape: BatchShape) -> Transfer:
        """Messages between this pipeline's neighbours; the median over them."""
        engine = self._engine
        sequences, tokens = shape
        if engine.num_stages == 1:
            return Transfer()
        sizes = sorted({max(1, tokens // 2**k) for k in range(0, 8, 2)})
        boundary = engine._boundaries.get(("downstream", True))
        per_token = 0.0
        if boundary is not None:
            per_token = boundary.bytes(sequences, tokens) / (sequences * tokens)
        per_token = self._over_stages(per_token)[0]
        lengths = [int(sequences * size * per_token) for size in sizes]
        upstream = None if engine.is_first_stage() else engine._links[0]
        downstream = None if engine.is_last_stage() else engine._links[1]
        with engine._watchdog.waiting(Wait("the timing of messages", "the neighbouring stages")):
            mine = measure_round_trips(
                engine.stage_id, upstream, downstream, lengths, device=engine.device
            )
        return Transfer.fitted(
            [samples for samples in self._over_stages(mine) if samples], bytes_per_token=per_token
        )

    def _any_rank(self, mine: bool) -> bool:
        engine = self._engine
        flag = torch.tensor(int(mine), device=engine.device)
        with engine._watchdog.waiting(Wait("the next slices to time", "all ranks")):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _over_stages(self, mine: Any) -> list[Any]:
        engine = self._engine
        stages: list[Any] = [None] * engine.num_stages
        group = engine.grid.get_pipe_parallel_group()
        with engine._watchdog.waiting(Wait("the profile", "all stages of this pipeline")):
            torch.distributed.all_gather_object(stages, mine, group=group)
        return stages

    def _everywhere(self, mine: Any) -> list[Any]:
        ranks: list[Any] = [None] * dist.get_world_size()
        with self._engine._watchdog.waiting(Wait("the shapes to plan", "all ranks")):
            torch.distributed.all_gather_object(ranks, mine)
        return ranks


def _stage_under_test(
    engine: TokenSliceEngine,
    inputs: list[Tensors],
    labels: list[Tensors],
    received: tuple[Tensor, ...] | None,
) -> StageUnderTest:
    adapter = engine._adapter

    def make_inputs(sequences: int, tokens: TokenRange) -> Tensors:
        if received is None:
            loaded = _tile(adapter.inputs, inputs[0], (sequences, tokens.stop))
            return engine._cut_inputs(loaded, slice(0, sequences), tokens.as_slice)
        templates = engine._boundaries["upstream", True].tensors
        made = tuple(
            tensor.detach().clone()
            if dim is None
            else _crossed(tensor, dim, template, sequences, tokens)
            for tensor, dim, template in zip(received, adapter.boundary, templates, strict=True)
        )
        engine._mark_received(made)
        return made if len(made) > 1 else made[0]

    def make_loss(scheme: SliceScheme) -> MicroBatchLoss:
        cut = _tile(adapter.labels, labels[0], (scheme.sequences, scheme.seq_length))
        return engine._micro_batch_loss(cut, scheme, engine._loss_mode, keep=False)

    def run(inputs: Tensors) -> Any:
        if isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.clear_backward_seen_flag()
        # A clone, as in the engine: the first layer may work in place.
        return engine.module(cloned(inputs))

    return StageUnderTest(
        run=run,
        inputs=make_inputs,
        parameters=[p for p in engine.module.parameters() if p.requires_grad],
        device=engine.device,
        loss=make_loss if engine.is_last_stage() else None,
        autocast=lambda: autocast_if_enabled(engine),
        splits_backward=splits_backward(engine.terapipe.schedule),
    )


def _crossed(
    received: Tensor, dim: TensorDims, template: TensorTemplate, sequences: int, tokens: TokenRange
) -> Tensor:
    """A slice of what crosses to a stage; under sequence parallelism this rank's share of it."""
    start, stop = (
        template.size(1, position)[dim.sequence] if position else 0
        for position in (tokens.start, tokens.stop)
    )
    return dim.tile(received, sequences, stop).narrow(dim.sequence, start, stop - start).clone()


def _tile(dims: Sequence[Dims], loaded: Tensors, shape: BatchShape) -> Tensors:
    """Loaded tensors, repeated or cut to (sequences, tokens)."""
    sequences, tokens = shape
    made = tuple(
        tensor if dim is None else dim.tile(tensor, sequences, tokens)
        for tensor, dim in zip(as_tuple(loaded), dims, strict=True)
    )
    return made if isinstance(loaded, tuple) else made[0]


@contextmanager
def _undisturbed(engine: TokenSliceEngine) -> Iterator[None]:
    """Leaves no trace of what runs inside: no optimizer's hook, no random state, no buffer."""
    devices = [engine.device] if engine.device.type != "cpu" else []
    own = engine._adapter.keep_random_state or nullcontext
    buffers = [(buffer, buffer.detach().clone()) for buffer in engine.module.buffers()]
    states = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices, device_type=engine.device.type if devices else "cuda"),
            own(),
            without_gradient_hooks(engine.module.parameters()),
        ):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _half(tokens: int, granularity: int) -> int:
    """A slice whose memory is counted, after a context of as many tokens."""
    return max(granularity, min(256, tokens // 2) // granularity * granularity)


def _group_sizes(sequences: int) -> list[int]:
    """Numbers of sequences that are timed together; the model interpolates between them."""
    return sorted({sequences, max(1, sequences // 2), 1}, reverse=True)


def _training_state(engine: TokenSliceEngine) -> dict[str, float]:
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    replicas = engine.grid.get_data_parallel_world_size() if engine.zero_optimization() else 1
    return {
        "parameters": float(sum(p.numel() * p.element_size() for p in parameters)),
        "gradients": float(sum(p.numel() * p.element_size() for p in trained)),
        "optimizer": optimizer_bytes(
            sum(p.numel() for p in trained),
            half=any(p.element_size() < 4 for p in trained),
            replicas=replicas,
        ),
    }


def _memory_limit(engine: TokenSliceEngine) -> float | None:
    limit = engine.terapipe.memory_gib
    if limit is not None:
        return limit * GIB
    if engine.device.type != "cuda":
        return None
    return _USABLE_MEMORY * torch.cuda.get_device_properties(engine.device).total_memory


def _attempt(make: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return make()
    except TeraPipeError as error:
        return str(error)


def _describe(chosen: Plan, shape: BatchShape) -> str:
    sequences, tokens = shape
    bubble = max(chosen.bubble or [0.0])
    return (
        f"plan for micro-batches of {sequences} x {tokens} tokens: {chosen.scheme}, "
        f"{chosen.schedule} with warmup {chosen.warmup}, {chosen.latency_ms:.0f} ms a step "
        "expected, "
        f"{chosen.unsliced.latency_ms:.0f} ms without slices ({chosen.speedup:.2f}x), "
        f"bubble at most {bubble:.0%}"
    )


__all__ = ["CHECKPOINT_KEY", "AutoPlans"]
