"""One step of megatron's training or evaluation, in token slices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from ..config import TeraPipeConfig
from ..errors import ConfigError
from ..models.built_layers import reads_masks
from ..runtime.channel import Slot
from ..runtime.header import BatchShape, Pipeline, exchange_shapes
from ..runtime.kv_context import current_slice
from ..runtime.loss import check_loss_fits
from ..runtime.step import GroupState
from ..runtime.watchdog import Wait
from ..runtime.weight_grads import Work, put_off, settle
from ..schedule.order import Action, actions, joins_next
from ..scheme import SliceScheme, SlicesSetting
from .megatron_loss import JoinedLoss
from .megatron_neighbours import Neighbours, boundary_of
from .megatron_recording import Recorded, record
from .megatron_seams import loss_of, schedules
from .megatron_sync import GradientSync


@dataclass
class Call:
    """What megatron's schedule was called with.

    Attributes:
        forward_step: the script's.
        data_iterator: what it reads.
        model: this stage, in megatron's wrappers.
        config: megatron's.
        micro_batches: of the step.
        shape: (sequences, tokens) of each, unless lengths vary.
        forward_only: whether this is evaluation.
        collect_non_loss_data: whether the loss function is asked for something else than a loss.
        first_val_step: as in megatron.
        results: what the loss functions report, as megatron returns it.
    """

    forward_step: Callable[..., Any]
    data_iterator: Any
    model: nn.Module
    config: Any
    micro_batches: int
    shape: BatchShape
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    results: list[Any] = field(default_factory=list)


class Step:
    """Runs a step's slices in the order of the block's schedule.

    Args:
        call: megatron's arguments.
        block: the ``"terapipe"`` block.
        neighbours: this stage's.
        shares: ranks that share a slice's tokens, under sequence parallelism.
        sync: told of the last backward.
    """

    def __init__(
        self,
        call: Call,
        block: TeraPipeConfig,
        neighbours: Neighbours,
        *,
        shares: int,
        sync: GradientSync,
    ) -> None:
        self._call, self._block, self._neighbours = call, block, neighbours
        self._shares, self._sync = shares, sync
        self._heeds_masks = reads_masks(call.model)
        self._set_input = get_attr_wrapped_model(call.model, "set_input_tensor")
        self._recorded: dict[int, Recorded] = {}
        self._groups: list[GroupState] = []
        self._losses: dict[int, JoinedLoss] = {}
        self._due: list[list[Work]] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=neighbours.device)
        """Valid tokens so far, as the loss functions count them."""

    def run(self) -> None:
        """Runs all slices.

        Raises:
            ConfigError: if the slices do not fit the micro-batches.
            RankFailure: if a neighbour was lost.
        """
        call, neighbours = self._call, self._neighbours
        for shape in self._shapes():
            (group,) = self._scheme(shape).groups
            self._groups.append(
                GroupState(len(self._groups), 0, slice(0, group.sequences), group.ranges())
            )
        name = "forward" if call.forward_only else self._block.schedule
        counts = [len(group.ranges) for group in self._groups]
        warmup = 0 if call.forward_only else self._block.given_warmup
        order = actions(name, neighbours.stages, len(counts), counts, warmup=warmup)
        order = order[neighbours.stage]
        backwards = [action for action in order if action.kind == "B"]
        neighbours.begin(
            boundary_of(call.config, shares=self._shares),
            [self._slot(action) for action in order if action.kind == "F"],
            [self._slot(action) for action in backwards],
        )
        for action, joins in zip(order, joins_next(order), strict=True):
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                self._weights(action, joins=joins)
            else:
                if action is backwards[-1]:
                    self._sync.before_last_backward()
                self._backward(action)
        neighbours.drain(trains=not call.forward_only)

    def release(self) -> None:
        """Frees what slices still hold."""
        for group in self._groups:
            group.release()
        self._losses.clear()
        self._recorded.clear()
        self._due.clear()

    def _shapes(self) -> list[BatchShape]:
        """Of every micro-batch; where lengths vary, all are recorded first, and compared."""
        call, neighbours = self._call, self._neighbours
        if not call.config.variable_seq_lengths:
            return [call.shape] * call.micro_batches
        shapes = [self._record(number).shape for number in range(call.micro_batches)]
        pipeline = Pipeline(
            group=neighbours.group,
            stages=neighbours.stages,
            spans_world=torch.distributed.get_world_size() > neighbours.stages,
            device=neighbours.device,
        )
        loads = neighbours.is_first or neighbours.is_last
        if loads and None in shapes:
            raise ConfigError(
                "forward_step: found no tokens and no labels for the model, allowed is one of them "
                "on the first and on the last stage with variable_seq_lengths; change forward_step"
            )
        with neighbours.watchdog.waiting(Wait("the step's header", "all stages of this pipeline")):
            found, _ = exchange_shapes(
                pipeline,
                cast("list[BatchShape]", shapes) if loads else None,
                call.micro_batches,
                check=lambda every: [self._scheme(shape) for shape in every],
            )
        return found

    def _scheme(self, shape: BatchShape) -> SliceScheme:
        sequences, tokens = shape
        scheme = SliceScheme.resolve(
            cast(SlicesSetting, self._block.slices),
            sequences=sequences,
            seq_length=tokens,
            multiple_of=self._shares,
        )
        check_loss_fits("whole_sequence", scheme)
        return scheme

    def _slot(self, action: Action) -> Slot:
        group = self._groups[action.micro_batch]
        length = group.ranges[action.slice].length
        return Slot(action.micro_batch, action.slice, group.sequences, length)

    def _record(self, number: int) -> Recorded:
        """The script's ``forward_step`` for one micro-batch; the model is not run."""
        call = self._call
        with self._autocast():
            recorded = record(
                call.forward_step,
                call.data_iterator,
                call.model,
                shape=call.shape,
                heeds_masks=self._heeds_masks,
            )
        self._recorded[number] = recorded
        return recorded

    def _begin_micro_batch(self, number: int) -> None:
        """Tells the model of a new micro-batch, before its first slice."""
        call, group = self._call, self._groups[number]
        recorded = self._recorded.get(number) or self._record(number)
        expected = (group.sequences, group.ranges[0].total)
        if recorded.shape not in (None, expected):
            raise ConfigError(
                f"forward_step: found a micro-batch of (sequences, tokens) {recorded.shape}, "
                f"allowed is {expected}, the (micro_batch_size, seq_length) that the schedule is "
                "called with; change these, or set variable_seq_lengths"
            )
        first = schedules.check_first_val_step(call.first_val_step, call.forward_only, number == 0)
        if first and hasattr(call.model, "set_is_first_microbatch"):
            call.model.set_is_first_microbatch()
        schedules.set_current_microbatch(call.model, number)
        if self._neighbours.is_last:
            lengths = [tokens.length for tokens in group.ranges]
            self._losses[number] = JoinedLoss(lengths, self._calculator(recorded.loss_func))

    def _calculator(self, loss_func: Any) -> Callable[[Tensor], Tensor]:
        call = self._call
        if loss_func is None and not call.forward_only:
            raise ConfigError(
                "forward_step: found no loss function, allowed is one in training; return one"
            )

        def calculate(output: Tensor) -> Tensor:
            loss, tokens = loss_of(call.model, output, loss_func, call, is_last=True)
            self.tokens += tokens
            return loss

        return calculate

    def _forward(self, action: Action) -> None:
        call, neighbours = self._call, self._neighbours
        number, index = action.micro_batch, action.slice
        group = self._groups[number]
        tokens = group.ranges[index]
        received = neighbours.receive_input()
        self._start("forward-compute")
        if index == 0:
            self._begin_micro_batch(number)
        self._set_input([received])
        with current_slice(tokens, group.context), self._autocast():
            output = call.model(**self._recorded[number].cut(tokens))
        if neighbours.is_last:
            # After the last slice this stops the timer, as megatron does after its loss.
            self._losses[number].forward(output)
        elif tokens.is_last:
            loss_of(call.model, output, None, call, is_last=False)
        if not tokens.is_last:
            self._stop("forward-compute")
        neighbours.send_output(output, self._slot(action))
        if not call.forward_only:
            self._keep(group, index, received, output)
        if tokens.is_last:
            del self._recorded[number]
            if call.forward_only:
                group.free_context()
                self._losses.pop(number, None)

    def _keep(self, group: GroupState, index: int, received: Tensor | None, output: Tensor) -> None:
        if received is not None:
            group.inputs[index] = received
        if self._neighbours.is_last:
            return
        # Only its graph is needed; what is being sent is kept by the channel.
        schedules.deallocate_output_tensor(output, self._call.config.deallocate_pipeline_outputs)
        group.outputs[index] = (output,)

    def _backward(self, action: Action) -> None:
        number, index = action.micro_batch, action.slice
        group, neighbours = self._groups[number], self._neighbours
        grad = None if neighbours.is_last else neighbours.receive_output_grad()
        self._start("backward-compute")
        later: AbstractContextManager[None] = nullcontext()
        if self._block.schedule == "zb-h1":
            later = put_off(group.owed.setdefault(index, []))
        with later, current_slice(group.ranges[index], group.context, backward=True):
            if grad is None:
                root, grad = self._losses[number].take_root(index, self._scale)
                torch.autograd.backward(root, grad)
            else:
                (root,) = group.outputs.pop(index)
                self._backward_from(root, grad)
        self._stop("backward-compute")
        if not neighbours.is_first:
            neighbours.send_input_grad(cast(Tensor, group.inputs.pop(index)), self._slot(action))
        if index == 0:
            # dK and dV are complete: nothing needs this micro-batch's context any more.
            group.free_context()
            self._losses.pop(number, None)

    def _backward_from(self, root: Tensor, grad: Tensor) -> None:
        if not root.requires_grad:
            return
        if self._call.config.deallocate_pipeline_outputs:
            schedules.custom_backward(root, grad)
        else:
            torch.autograd.backward(root, grad)

    def _weights(self, action: Action, *, joins: bool) -> None:
        """A slice's weight gradients, or leaves them to the next action."""
        self._due.append(self._groups[action.micro_batch].owed.pop(action.slice))
        if not joins:
            settle(self._due)

    def _scale(self, loss: Tensor) -> Tensor:
        scale = self._call.config.grad_scale_func
        return loss if scale is None else scale(loss)

    def _autocast(self) -> AbstractContextManager[Any]:
        config = self._call.config
        if not config.enable_autocast:
            return nullcontext()
        return torch.autocast(self._neighbours.device.type, dtype=config.autocast_dtype)

    def _start(self, timer: str) -> None:
        if self._call.config.timers is not None:
            self._call.config.timers(timer, log_level=2).start()

    def _stop(self, timer: str) -> None:
        if self._call.config.timers is not None:
            self._call.config.timers(timer).stop()


__all__ = ["Call", "Step"]
