"""megatron-core's ``forward_backward_func`` in token slices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import nn

from ..config import TeraPipeConfig
from ..models.built_layers import slice_layers
from ..models.split_backward import split_linear_layers
from ..runtime.agreement import agree, common_settings, error_of
from ..runtime.watchdog import Wait
from ..schedule.order import splits_backward
from .megatron_neighbours import Neighbours
from .megatron_recording import levels
from .megatron_refuse import check_call, check_model
from .megatron_seams import check_seams, finalize_gradients, process_groups
from .megatron_step import Call, Step
from .megatron_sync import GradientSync

_PREPARED = "_terapipe_ds_prepared"


class SlicedSchedule:
    """Takes the place of megatron's ``forward_backward_pipelining_without_interleaving``, and of
    ``forward_backward_no_pipelining``; same arguments, same result.

    Args:
        block: the ``"terapipe"`` block.
    """

    def __init__(self, block: TeraPipeConfig) -> None:
        check_seams()
        self._block = block
        self._neighbours: dict[tuple[int, ...], Neighbours] = {}

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """As megatron's; ``p2p_communicator`` has no use, since slices have channels of their own.

        Returns:
            On the last stage what the loss function reports of each micro-batch, else nothing.

        Raises:
            ConfigError: for what cannot be sliced correctly.
            RankFailure: if a neighbour was lost.
        """
        check_call(
            model=model,
            data_iterator=data_iterator,
            seq_length=seq_length,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        )
        model, data_iterator = _only(model), _only(data_iterator)
        groups = process_groups() if pg_collection is None else pg_collection
        neighbours = self._neighbours_in(groups.pp)
        with neighbours.watchdog.step():
            # All ranks find out together, and may go on: not a failure of one.
            self._prepare(model, neighbours)
        with neighbours.guarded():
            config = get_model_config(model)
            call = Call(
                forward_step=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                config=config,
                micro_batches=num_microbatches,
                shape=(micro_batch_size, seq_length),
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
            )
            timers = config.timers
            if timers is not None:
                timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
            tokens = self._run(call, neighbours, groups)
            if config.finalize_model_grads_func is not None and not forward_only:
                with neighbours.watchdog.waiting(Wait("the reduction of gradients", "all ranks")):
                    finalize_gradients(
                        config,
                        model,
                        tokens if config.calculate_per_token_loss else None,
                        groups,
                        force_all_reduce=force_all_reduce,
                    )
            if timers is not None:
                timers("forward-backward").stop()
        return call.results

    def _run(self, call: Call, neighbours: Neighbours, groups: Any) -> torch.Tensor:
        config = call.config
        sync = GradientSync(
            config,
            call.model,
            is_first=neighbours.is_first,
            splits_backward=splits_backward(self._block.schedule),
        )
        step = Step(
            call,
            self._block,
            neighbours,
            shares=groups.tp.size() if config.sequence_parallel else 1,
            sync=sync,
        )
        try:
            with nullcontext() if call.forward_only else sync:
                step.run()
        finally:
            step.release()
        return step.tokens

    def _neighbours_in(self, group: Any) -> Neighbours:
        """This rank's channels in a pipeline; made once."""
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if ranks not in self._neighbours:
            self._neighbours[ranks] = Neighbours(
                group,
                timeout_s=self._block.timeout_s,
                device=_device(),
            )
        return self._neighbours[ranks]

    def _prepare(self, model: nn.Module, neighbours: Neighbours) -> None:
        """Checks a model that is new here, on all ranks, and lets its layers see slices."""
        *_, gpt = levels(model)
        if hasattr(gpt, _PREPARED):
            return
        splits = splits_backward(self._block.schedule)
        error = error_of(
            lambda: check_model(model, stages=neighbours.stages, splits_backward=splits)
        )
        with neighbours.watchdog.waiting(Wait("the settings", "all ranks")):
            agree(common_settings(self._block), error)
        slice_layers(gpt)
        if splits:
            split_linear_layers(gpt)
        setattr(gpt, _PREPARED, True)


def _only(one: Any) -> Any:
    return one[0] if isinstance(one, list) else one


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


__all__ = ["SlicedSchedule"]
