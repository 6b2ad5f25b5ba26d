"""What a stage does for a slice: the token-slice instructions, run by a DeepSpeed engine.

Every instruction of ``schedule/instructions.py`` has its method here, and the table that
``PipelineEngine._exec_schedule`` looks methods up in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import (
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    PipelineEngine,
)
from torch import Tensor

from ..errors import TeraPipeError
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
from ..schedule.order import Action
from .adapter import SequenceAdapter, Tensors, as_tuple, cloned
from .auxiliary import scaled_loss
from .boundary import Boundary
from .channel import RecvChannel, SendChannel
from .deepspeed_seams import autocast_if_enabled, own_schedule, recomputes_reentrantly
from .kv_context import current_slice
from .loss import MicroBatchLoss
from .step import StepState
from .watchdog import Wait, Watchdog
from .weight_grads import put_off, settle

_NOTHING = nullcontext()


class SliceExecution(PipelineEngine):
    """The instructions of a :class:`~terapipe_ds.runtime.engine.TokenSliceEngine`, which sets up
    what they use."""

    _adapter: SequenceAdapter
    _watchdog: Watchdog
    _activations_in: RecvChannel
    _activations_out: SendChannel
    _grads_in: RecvChannel
    _grads_out: SendChannel
    _boundaries: dict[tuple[str, bool], Boundary]
    """What crosses to the previous and to the next stage, in training and in evaluation (where no
    gradient comes back); learnt from the first slice."""
    _step: StepState | None
    _times: bool
    _autocasts: bool

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
        pipe_schedule = own_schedule(self, pipe_schedule)
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
        recomputes = recomputes_reentrantly(self.module)
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
        if slice == 0 and step.training:
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
        if any(tensor.requires_grad for tensor in outputs):
            return
        if any(parameter.requires_grad for parameter in self.module.parameters()):
            raise TeraPipeError(
                f"model: found trainable parameters on stage {self.stage_id} that no output needs "
                "a gradient for, allowed is a stage that trains or is frozen; with "
                "activation_checkpoint_interval set pipeline.use_reentrant to false"
            )

    def _cut_inputs(self, loaded: Tensors, rows: slice, tokens: slice) -> Tensors:
        """The first stage's inputs of some sequences' tokens."""
        cut = self._adapter.cut(loaded, self._adapter.inputs, rows, tokens)
        if not torch.is_grad_enabled() or not recomputes_reentrantly(self.module):
            return cut
        # Reentrant checkpointing detaches a segment none of whose inputs needs a gradient.
        tensors = tuple(
            tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            for tensor in as_tuple(cut)
        )
        return tensors if isinstance(cut, tuple) else tensors[0]

    def _collect(self, loss: MicroBatchLoss) -> None:
        """Adds a finished micro-batch to what ``train_batch`` and ``eval_batch`` report."""
        outputs = None
        if self.eval_return_logits or not self._compute_loss:
            outputs = loss.take_outputs()
        if self.eval_return_logits:
            self.outputs = outputs
        self.loss = loss.value if self._compute_loss else outputs
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

    def _exec_backward_weight(self, micro_batch: int, slice: int, joins_next: bool) -> None:
        step = self._current_step()
        step.due.append(step.groups[micro_batch].owed.pop(slice))
        if not joins_next:
            with _EngineBackward(self):
                settle(step.due)

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

    def allreduce_and_copy(
        self, small_bucket: list[Tensor], dp_group: Any, dp_world_size: int | None = None
    ) -> None:
        """As the parent's; nothing where the sum over one replica would be copied twice."""
        replicas = dist.get_world_size(group=dp_group)
        # Experts are averaged over more ranks than share them; a cast there and back rounds.
        is_sum_of_one = replicas == 1 and dp_world_size in (None, 1)
        if is_sum_of_one and all(t.dtype == self.communication_data_type for t in small_bucket):
            return
        super().allreduce_and_copy(small_bucket, dp_group, dp_world_size)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        with self._watchdog.waiting(Wait("the optimizer step", "all ranks")):
            super()._exec_optimizer_step(lr_kwargs)

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

    def __init__(self, engine: SliceExecution) -> None:
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


@contextmanager
def _running(timer: Any) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()
