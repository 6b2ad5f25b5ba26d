"""TokenSliceEngine: DeepSpeed's ``PipelineEngine`` with token slices inside its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    TRAIN_BATCH_TIMER,
)
from torch import Tensor

from ..config import TeraPipeConfig, read_block
from ..errors import ConfigError, TeraPipeError
from ..planner.cost import CostModel
from ..planner.planning import Plan
from ..schedule.lower import TokenSliceSchedule
from ..schedule.order import actions, splits_backward
from ..scheme import SliceScheme, SlicesSetting
from .adapter import Tensors, adapter_of
from .agreement import agree, error_of, settings
from .auto import CHECKPOINT_KEY, AutoPlans
from .auxiliary import scale_auxiliary_losses
from .channel import Peer, RecvChannel, SendChannel, links
from .checkpoints import check_loadable
from .header import BatchShape, Pipeline, exchange_shapes
from .loading import load
from .loss import MicroBatchLoss, check_loss_fits, choose_loss
from .refuse import check_module, check_supported
from .slice_execution import SliceExecution
from .step import StepState
from .torch_seams import default_store
from .tracing import Tracer, check_folder
from .watchdog import Wait, Watchdog
from .weight_grads import split_linear_layers


class TokenSliceEngine(SliceExecution):
    """Trains and evaluates a ``PipelineModule`` in token slices; see ``docs/how-it-works.md``.

    Everything public is as in ``PipelineEngine``: ``train_batch``, ``eval_batch``, checkpoints,
    monitors, timers, ``set_train_batch_size``. ``terapipe_ds.initialize`` builds it.

    Raises:
        ConfigError: on every rank, if any rank's settings cannot be sliced correctly or ranks
            differ.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module, ds_config = kwargs["model"], kwargs["config_class"]
        data = kwargs.get("training_data")
        block = read_block(ds_config._param_dict)
        if block is None:
            raise ConfigError('terapipe: found no "terapipe" block, allowed is a JSON object')
        error = error_of(lambda: check_supported(block, module, ds_config, data))
        if error is None and block.trace is not None:
            error = error_of(lambda: check_folder(block.trace))
        agree(settings(block, ds_config), error)
        super().__init__(*args, **kwargs)

        self.terapipe: TeraPipeConfig = block
        self._adapter = adapter_of(module)
        # Once more, now that DeepSpeed has set the module up as its configuration asks.
        agree({}, error_of(lambda: check_module(module)))
        self._loss_mode = choose_loss(block.loss, self._adapter)
        self._watchdog = Watchdog(
            f"rank {self.global_rank} (stage {self.stage_id})",
            timeout_s=block.timeout_s,
            # Its own connection: the main thread may block in a call on the shared one.
            store=default_store().clone(),
        )
        self._pipeline = Pipeline(
            group=self.grid.get_pipe_parallel_group(),
            stages=self.num_stages,
            spans_world=dist.get_world_size() > self.num_stages,
            device=self.device,
        )
        self._make_channels()
        self._boundaries = {}
        self._schedules: dict[tuple[Any, ...], TokenSliceSchedule] = {}
        self._step = None
        self._agreed = False
        self._times = self._autocasts = False
        self._tracer = None
        if block.trace is not None:
            self._tracer = Tracer(self, block.trace, block.trace_steps)
        if splits_backward(block.schedule):
            (self._adapter.split_backward or split_linear_layers)(module)
        scale_auxiliary_losses(self)
        self._auto = AutoPlans(self) if block.slices == "auto" else None

    def _make_channels(self) -> None:
        upstream = None if self.is_first_stage() else self._peer(self.prev_stage)
        downstream = None if self.is_last_stage() else self._peer(self.next_stage)
        watchdog, device = self._watchdog, self.device
        with watchdog.step():
            to_upstream, to_downstream = links(
                self.global_rank,
                self.stage_id,
                upstream=upstream,
                downstream=downstream,
                watchdog=watchdog,
                device=device,
            )
        self._links = to_upstream, to_downstream
        if to_upstream is not None:
            peer, forward, backward = to_upstream
            self._activations_in = RecvChannel("activation", peer, forward, watchdog, device)
            self._grads_out = SendChannel("gradient", peer, backward, watchdog)
        if to_downstream is not None:
            peer, forward, backward = to_downstream
            self._activations_out = SendChannel("activation", peer, forward, watchdog)
            self._grads_in = RecvChannel("gradient", peer, backward, watchdog, device)

    def _peer(self, stage: int) -> Peer:
        return Peer(rank=self.grid.stage_to_global(stage_id=stage), stage=stage)

    # Steps

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """As ``PipelineEngine.train_batch``.

        Raises:
            DataIteratorEnded: on every rank, if an iterator ends before the step's micro-batches.
            ConfigError: on every rank, if the slices do not fit the loaded micro-batches.
            RankFailure: if a neighbour was lost.
        """
        with self._guarded(), self._tracing():
            return super().train_batch(data_iter)

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.eval_batch``, forward only and in slices.

        Raises:
            As :meth:`train_batch`.
        """
        train_iterator = self.data_iterator
        try:
            with self._guarded():
                return super().eval_batch(data_iter, *args, **kwargs)
        finally:
            self.set_dataiterator(train_iterator)
            self.eval_return_logits = False

    @property
    def plans(self) -> dict[BatchShape, Plan]:
        """With ``"slices": "auto"`` the plan for each (sequences, tokens) of a micro-batch."""
        return {} if self._auto is None else dict(self._auto.plans)

    @property
    def costs(self) -> dict[int, CostModel]:
        """On rank 0, for each number of sequences the costs that the plans rest on."""
        return {} if self._auto is None else dict(self._auto.costs)

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: Any = None, **kwargs: Any
    ) -> Any:
        """As ``PipelineEngine.save_checkpoint``; keeps automatic plans too."""
        client_state = dict(client_state or {})
        if self._auto is not None:
            client_state[CHECKPOINT_KEY] = self._auto.state()
        return super().save_checkpoint(save_dir, tag=tag, client_state=client_state, **kwargs)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """As ``PipelineEngine.load_checkpoint``; takes the automatic plans that it was saved with.

        They are used instead of new ones, unless ``"replan"`` is set.

        Raises:
            ConfigError: on every rank, for a checkpoint that DeepSpeed would fail on or load
                wrongly, such as one of another number of stages, unless it is for its weights.
        """
        wanted = {
            "load_optimizer_states": load_optimizer_states,
            "load_module_only": load_module_only,
        }
        agree({}, error_of(lambda: check_loadable(self, load_dir, tag, **wanted)))
        path, client_state = super().load_checkpoint(
            load_dir,
            tag=tag,
            load_module_strict=load_module_strict,
            load_lr_scheduler_states=load_lr_scheduler_states,
            custom_load_fn=custom_load_fn,
            **wanted,
        )
        state = client_state.pop(CHECKPOINT_KEY, None) if client_state else None
        if self._auto is not None:
            self._auto.restore(state)
        return path, client_state

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Watches a step, frees its slices, and lets no other rank wait for a failed one."""
        self._agreed = False
        try:
            with self._watchdog.step():
                yield
        except Exception as error:
            # What all ranks found together needs no word to the others, and they may go on.
            if not (self._agreed and isinstance(error, TeraPipeError)):
                self._watchdog.announce(f"{type(error).__name__}: {error}")
            timer = self.timers(TRAIN_BATCH_TIMER)
            if timer.started_:
                timer.stop()
            raise
        finally:
            if self._step is not None:
                self._step.release()
                self._step = None

    def _tracing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tracer is None else self._tracer.step()

    def _train_schedule(self) -> TokenSliceSchedule:
        return self._begin_step(self.terapipe.schedule, self.micro_batches, training=True)

    def _inference_schedule(self, micro_batches: int) -> TokenSliceSchedule:
        schedule = self._begin_step("forward", micro_batches, training=False)
        # Between this and the first instruction, eval_batch has a barrier.
        self._watchdog.begin(Wait("the start of the evaluation", "all ranks"))
        return schedule

    def _begin_step(
        self, schedule: str, micro_batches: int, *, training: bool
    ) -> TokenSliceSchedule:
        """Loads the step's micro-batches, cuts them, and posts the first receives."""
        # Asked once a step, not for every instruction.
        self._times = self.wall_clock_breakdown()
        self._autocasts = self.torch_autocast_enabled() or torch.is_autocast_enabled()
        with self._timed(BATCH_INPUT_TIMER):
            inputs, labels, shapes = load(
                self._next_batch,
                self._adapter,
                micro_batches,
                first_stage=self.is_first_stage(),
                last_stage=self.is_last_stage(),
                device=self.device,
            )
        wait = Wait("the step's header", "all stages of this pipeline")
        mode = self._loss_mode if self._compute_loss else "outputs"
        self._agreed = True
        auto = self._auto if training else None
        with self._watchdog.waiting(wait):
            shapes, unknown = exchange_shapes(
                self._pipeline,
                shapes,
                micro_batches,
                check=lambda found: self._schemes(found, mode),
                unknown=(lambda _: False) if auto is None else auto.unknown,
            )
        self._agreed = False
        if auto is not None and unknown:
            auto.make(shapes, inputs, labels)
        schemes = self._schemes(shapes, mode)
        self._step = StepState(
            training=training,
            schemes=schemes,
            inputs=inputs,
            losses=[
                self._micro_batch_loss(loaded, scheme, mode, keep=not training)
                # Only the last stage has labels.
                for loaded, scheme in zip(labels, schemes, strict=False)
            ],
        )
        if self._tracer is not None:
            self._tracer.saw(shapes, self._step.slices)
        lowered = self._schedule(
            schedule, micro_batches, self._step.slices, self._warmup(shapes) if training else 0
        )
        self._begin_receives(lowered.actions)
        return lowered

    def _schemes(self, shapes: list[BatchShape], mode: str) -> list[SliceScheme]:
        """How each of the step's micro-batches is cut.

        Raises:
            ConfigError: if the slices do not fit a micro-batch, or the loss the slices.
        """
        unit = self._adapter.multiple_of
        for _, tokens in shapes:
            if tokens % unit:
                raise ConfigError(
                    f"data: found sequences of {tokens} tokens, allowed are multiples of {unit} "
                    "(sequence parallelism shares them between ranks); change the sequence length"
                )
        if self._auto is not None:
            schemes = [self._auto.scheme(shape) for shape in shapes]
        else:
            slices = cast(SlicesSetting, self.terapipe.slices)
            schemes = [
                SliceScheme.resolve(
                    slices,
                    sequences=sequences,
                    seq_length=tokens,
                    multiple_of=unit,
                )
                for sequences, tokens in shapes
            ]
        for scheme in schemes:
            check_loss_fits(mode, scheme, balances_micro_batch=self._adapter.balances_micro_batch)
        return schemes

    def _warmup(self, shapes: Iterable[BatchShape]) -> int:
        """The slack of a training step's schedule; all its micro-batches share one."""
        warmup = self.terapipe.warmup
        if warmup != "auto":
            return warmup
        plans = [] if self._auto is None else [self._auto.plans[shape] for shape in shapes]
        return max((plan.warmup for plan in plans), default=0)

    def _schedule(
        self, schedule: str, micro_batches: int, slices: list[int], warmup: int
    ) -> TokenSliceSchedule:
        """This stage's instructions; the same ones serve every step of the same shape."""
        key = (schedule, micro_batches, tuple(slices), warmup)
        if key not in self._schedules:
            order = actions(schedule, self.num_stages, len(slices), slices, warmup=warmup)
            self._schedules[key] = TokenSliceSchedule(
                order[self.stage_id],
                micro_batches=micro_batches,
                stages=self.num_stages,
                stage_id=self.stage_id,
            )
        return self._schedules[key]

    def _micro_batch_loss(
        self, labels: Tensors, scheme: SliceScheme, mode: str, *, keep: bool
    ) -> MicroBatchLoss:
        return MicroBatchLoss(
            self.module.loss_fn,
            self._adapter,
            labels,
            scheme,
            mode=mode,
            keep_outputs=keep and self.eval_return_logits,
            additional_losses=self.module.get_additional_losses,
        )

    def _aggregate_total_loss(self) -> Tensor:
        with self._watchdog.waiting(Wait("the loss", "the last stage and all replicas")):
            return super()._aggregate_total_loss()

    def _reduce_outputs(self, *args: Any, **kwargs: Any) -> Any:
        with self._watchdog.waiting(Wait("the loss", "the last stages of all replicas")):
            return super()._reduce_outputs(*args, **kwargs)

    def _bcast_pipe_scalar(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._watchdog.waiting(Wait("the loss", "the last stage")):
            return super()._bcast_pipe_scalar(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: compiled code would be specialised on one slice."""
        raise ConfigError(
            "engine.compile: found a call, allowed is none with token slices so far; drop the call"
        )
