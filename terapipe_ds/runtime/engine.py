"""TokenSliceEngine: DeepSpeed's ``PipelineEngine`` with token slices inside its micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    TRAIN_BATCH_TIMER,
    PipelineEngine,
)
from torch import Tensor

from ..config import TeraPipeConfig, read_block
from ..errors import ConfigError, TeraPipeError
from ..planner.cost import CostModel
from ..planner.planning import Plan
from ..schedule.instructions import (
    BackwardInput,
    BackwardSlice,
    BackwardWeight,
    ForwardSlice,
    RecvActivationSlice,
    RecvGradSlice,
    SendActivationSlice,
    SendGradSlice,
)
from ..schedule.lower import TokenSliceSchedule
from ..schedule.order import Action, actions, splits_backward
from ..scheme import SliceScheme, SlicesSetting
from .adapter import Tensors, adapter_of, as_tuple, cloned
from .agreement import agree, error_of, settings
from .auto import CHECKPOINT_KEY, AutoPlans
from .auxiliary import scale_auxiliary_losses, scaled_loss
from .boundary import Boundary
from .channel import Peer, RecvChannel, SendChannel, links
from .deepspeed_seams import autocast_if_enabled
from .header import BatchShape, Pipeline, exchange_shapes
from .kv_context import current_slice
from .loading import load
from .loss import MicroBatchLoss, check_loss_fits, choose_loss
from .refuse import check_module, check_supported
from .step import StepState
from .torch_seams import default_store
from .tracing import Tracer, check_folder
from .watchdog import Wait, Watchdog
from .weight_grads import put_off, split_linear_layers

_NOTHING = nullcontext()


class TokenSliceEngine(PipelineEngine):
    """Trains and evaluates a ``PipelineModule`` in token slices; see ``docs/how-it-works.md``.

    Everything public is as in ``PipelineEngine``: ``train_batch``, ``eval_batch``, checkpoints,
    monitors, timers, ``set_train_batch_size``. ``terapipe_ds.initialize`` builds it.

    Raises:
        ConfigError: on every rank, if any rank's settings cannot be sliced correctly or ranks
            differ.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module, ds_config = kwargs["model"], kwargs["config_class"]
        block = read_block(ds_config._param_dict)
        if block is None:
            raise ConfigError('terapipe: found no "terapipe" block, allowed is a JSON object')
        error = error_of(lambda: check_supported(block, module, ds_config))
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
        # What crosses to the previous and to the next stage, in training and in evaluation (where
        # no gradient comes back); learnt from the first slice.
        self._boundaries: dict[tuple[str, bool], Boundary] = {}
        self._schedules: dict[tuple[Any, ...], TokenSliceSchedule] = {}
        self._step: StepState | None = None
        self._agreed = False
        self._times = self._autocasts = False
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
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

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.load_checkpoint``; takes the automatic plans that it was saved with.

        They are used instead of new ones, unless ``"replan"`` is set.
        """
        path, client_state = super().load_checkpoint(*args, **kwargs)
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
        lowered = self._schedule(schedule, micro_batches, self._step.slices)
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

    def _schedule(self, schedule: str, micro_batches: int, slices: list[int]) -> TokenSliceSchedule:
        """This stage's instructions; the same ones serve every step of the same shape."""
        key = (schedule, micro_batches, tuple(slices))
        if key not in self._schedules:
            order = actions(schedule, self.num_stages, len(slices), slices)
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

    def _begin_receives(self, order: Sequence[Action]) -> None:
        step = self._current_step()
        if not self.is_first_stage():
            slots = [step.slot(action) for action in order if action.kind == "F"]
            self._activations_in.begin(slots, self._boundaries.get(("upstream", step.training)))
        if not self.is_last_stage() and step.training:
            slots = [step.slot(action) for action in order if action.kind == "B"]
            boundary = self._boundaries.get(("downstream", True))
            self._grads_in.begin(slots, None if boundary is None else boundary.gradients())

    def _current_step(self) -> StepState:
        assert self._step is not None, "a slice instruction ran outside a step"
        return self._step

    def _exec_schedule(self, pipe_schedule: TokenSliceSchedule) -> None:
        self._watchdog.end()
        # As the parent's, but for what it does anew for every instruction.
        self.fwd_outputs = []
        run = self._INSTRUCTION_MAP
        for instructions in pipe_schedule:
            for instruction in instructions:
                run[type(instruction)](self, **instruction.kwargs)
        if not self.is_first_stage() and self._current_step().training:
            self._grads_out.drain()
        if not self.is_last_stage():
            self._activations_out.drain()
        if not self.module.training:
            ds_checkpointing.reset()

    # Instructions

    def _exec_recv_activation(self, micro_batch: int, slice: int) -> None:
        step = self._current_step()
        with self._timed(PIPE_RECV_INPUT_TIMER):
            key = ("upstream", step.training)
            if key not in self._boundaries:
                self._boundaries[key] = self._activations_in.recv_boundary()
                self._activations_in.learn(self._boundaries[key])
            tensors = self._activations_in.receive()
        if step.training:
            self._mark_received(tensors)
        step.groups[micro_batch].inputs[slice] = tensors if len(tensors) > 1 else tensors[0]

    def _mark_received(self, tensors: tuple[Tensor, ...]) -> None:
        """Makes those received tensors leaves whose gradients are sent back."""
        # Reentrant checkpointing detaches a segment none of whose inputs needs a gradient, as
        # those from a frozen stage do not.
        recomputes = self._reentrant_activation_checkpointing()
        for tensor, template in zip(
            tensors, self._boundaries["upstream", True].tensors, strict=True
        ):
            needs = template.requires_grad or (recomputes and tensor.is_floating_point())
            tensor.requires_grad_(needs)

    def _exec_forward(self, micro_batch: int, slice: int) -> None:
        step = self._current_step()
        group = step.groups[micro_batch]
        tokens = group.ranges[slice]
        inputs = group.inputs.get(slice)
        if self.is_first_stage():
            loaded = step.inputs[group.micro_batch]
            inputs = self._cut_inputs(loaded, group.rows, tokens.as_slice)
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.clear_backward_seen_flag()
        autocast = autocast_if_enabled(self) if self._autocasts else _NOTHING
        with current_slice(tokens, group.context), autocast:
            # A clone, as in stock DeepSpeed: the first layer may work in place.
            outputs = self.module(cloned(inputs))
        if slice == 0 and step.training and self._trains:
            self._check_trains(as_tuple(outputs))
        if not step.training:
            group.inputs.pop(slice, None)
        if not self.is_last_stage():
            group.outputs[slice] = as_tuple(outputs)
        else:
            loss = step.losses[group.micro_batch]
            loss.forward(group.index, slice, outputs)
            if loss.complete:
                self._collect(loss)
        if tokens.is_last and not step.training:
            group.free_context()

    def _check_trains(self, outputs: tuple[Tensor, ...]) -> None:
        if not any(tensor.requires_grad for tensor in outputs):
            raise TeraPipeError(
                f"model: found trainable parameters on stage {self.stage_id} that no output needs "
                "a gradient for, allowed is a stage that trains or is frozen; with "
                "activation_checkpoint_interval set pipeline.use_reentrant to false"
            )

    def _cut_inputs(self, loaded: Tensors, rows: slice, tokens: slice) -> Tensors:
        """The first stage's inputs of some sequences' tokens."""
        cut = self._adapter.cut(loaded, self._adapter.inputs, rows, tokens)
        if not torch.is_grad_enabled() or not self._reentrant_activation_checkpointing():
            return cut
        # Reentrant checkpointing detaches a segment none of whose inputs needs a gradient.
        tensors = tuple(
            tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            for tensor in as_tuple(cut)
        )
        return tensors if isinstance(cut, tuple) else tensors[0]

    def _collect(self, loss: MicroBatchLoss) -> None:
        """Adds a finished micro-batch to what ``train_batch`` and ``eval_batch`` report."""
        if self.eval_return_logits:
            self.outputs = loss.outputs()
        self.loss = loss.value if self._compute_loss else loss.outputs()
        self.fwd_outputs.append(self.loss)
        if not self._compute_loss:
            return
        self.total_loss = self.loss if self.total_loss is None else self.total_loss + self.loss
        if loss.additional is None:
            return
        if self.total_additional_losses is None:
            self.total_additional_losses = OrderedDict()
        totals = self.total_additional_losses
        for name, value in loss.additional.items():
            totals[name] = value if name not in totals else totals[name] + value

    def _exec_send_activation(self, micro_batch: int, slice: int) -> None:
        step = self._current_step()
        group = step.groups[micro_batch]
        outputs = group.outputs[slice]
        sequences, tokens = group.sequences, group.ranges[slice].length
        key = ("downstream", step.training)
        with self._timed(PIPE_SEND_OUTPUT_TIMER):
            if key not in self._boundaries:
                boundary = Boundary.of(
                    outputs, self._adapter.boundary, sequences=sequences, tokens=tokens
                )
                self._boundaries[key] = boundary
                self._activations_out.send_boundary(boundary, self.device)
                if step.training:
                    self._grads_in.learn(boundary.gradients())
            self._boundaries[key].check(outputs, sequences=sequences, tokens=tokens)
            self._activations_out.send(outputs, micro_batch, slice)
        if not step.training:
            del group.outputs[slice]

    def _exec_recv_grad(self, micro_batch: int, slice: int) -> None:
        with self._timed(PIPE_RECV_GRAD_TIMER):
            grads = self._grads_in.receive()
        self._current_step().groups[micro_batch].output_grads[slice] = grads

    def _exec_backward(self, micro_batch: int, slice: int) -> None:
        step = self._current_step()
        group = step.groups[micro_batch]
        marked = current_slice(group.ranges[slice], group.context, backward=True)
        with _EngineBackward(self), marked:
            if self.is_last_stage():
                loss = step.losses[group.micro_batch]
                root, grad = loss.take_root(group.index, slice, self._scale_loss)
                roots, grads = (root,), (grad,)
            else:
                outputs = group.outputs.pop(slice)
                roots = tuple(tensor for tensor in outputs if tensor.requires_grad)
                grads = group.output_grads.pop(slice)
            if roots:
                torch.autograd.backward(roots, grads)
        if slice == 0:
            # dK and dV are complete: nothing needs this micro-batch's context any more.
            group.free_context()

    def _exec_backward_input(self, micro_batch: int, slice: int) -> None:
        owed = self._current_step().groups[micro_batch].owed[slice] = []
        with put_off(owed):
            self._exec_backward(micro_batch, slice)

    def _exec_backward_weight(self, micro_batch: int, slice: int) -> None:
        owed = self._current_step().groups[micro_batch].owed.pop(slice)
        with _EngineBackward(self):
            # First owed, first done, and then dropped: each holds a layer's inputs.
            for index, work in enumerate(owed):
                owed[index] = _nothing
                work()

    def _scale_loss(self, loss: Tensor) -> Tensor:
        return scaled_loss(self, loss)

    def _exec_send_grad(self, micro_batch: int, slice: int) -> None:
        step = self._current_step()
        inputs = as_tuple(step.groups[micro_batch].inputs.pop(slice))
        with self._timed(PIPE_SEND_GRAD_TIMER):
            templates = self._boundaries["upstream", True].tensors
            grads = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor, template in zip(inputs, templates, strict=True)
                if template.requires_grad
            ]
            self._grads_out.send(grads, micro_batch, slice)

    def _exec_reduce_tied_grads(self) -> None:
        with self._watchdog.waiting(Wait("the reduction of tied gradients", "all tied stages")):
            super()._exec_reduce_tied_grads()

    def _exec_reduce_grads(self) -> None:
        with self._watchdog.waiting(Wait("the reduction of gradients", "all replicas")):
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        with self._watchdog.waiting(Wait("the optimizer step", "all ranks")):
            super()._exec_optimizer_step(lr_kwargs)

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

    def _timed(self, name: str) -> Any:
        """One of DeepSpeed's timers, where ``wall_clock_breakdown`` asks for them."""
        return _running(self.timers(name)) if self._times else _NOTHING

    _INSTRUCTION_MAP: dict[type, Callable[..., None]] = {
        ds_schedule.OptimizerStep: _exec_optimizer_step,
        ds_schedule.ReduceGrads: _exec_reduce_grads,
        ds_schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        ForwardSlice: _exec_forward,
        BackwardSlice: _exec_backward,
        BackwardInput: _exec_backward_input,
        BackwardWeight: _exec_backward_weight,
        SendActivationSlice: _exec_send_activation,
        RecvActivationSlice: _exec_recv_activation,
        SendGradSlice: _exec_send_grad,
        RecvGradSlice: _exec_recv_grad,
    }


class _EngineBackward:
    """What DeepSpeed does around a backward of its own."""

    __slots__ = ("_engine",)

    def __init__(self, engine: TokenSliceEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._running_engine_backward = True
        self._engine._backward_prologue()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._engine._backward_epilogue()
        finally:
            self._engine._running_engine_backward = False


def _nothing() -> None:
    """Stands for work that has been done."""


@contextmanager
def _running(timer: Any) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()
