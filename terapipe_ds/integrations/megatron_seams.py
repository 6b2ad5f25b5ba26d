"""What of megatron-core's schedules this package stands on, in one place.

Read from megatron-core 0.16.1, and 0.15.3 where it differs. ``check_seams`` fails loudly where
something has moved; ``tests/integrations/test_megatron_core_script.py`` calls it. The layers' seams
are in ``models/built_layers.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

import megatron.core
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from ..errors import TeraPipeError
from ..versions import TESTED

# Of megatron.core.pipeline_parallel.schedules: the arithmetic of a loss, the backward from an
# output that has been freed, and what a model is told before a forward.
SCHEDULE_SEAMS = (
    "check_first_val_step",
    "custom_backward",
    "deallocate_output_tensor",
    "forward_backward_pipelining_without_interleaving",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "set_current_microbatch",
)

# What megatron's schedules may be called with.
ARGUMENTS = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)
# Of these, what megatron-core 0.15 does not know.
_FORCES_REDUCTION = "force_all_reduce"


def check_seams() -> None:
    """Raises where the installed megatron-core lacks what this package calls or stands for.

    Raises:
        TeraPipeError: names what has moved and the version that is known to work.
    """
    moved = [name for name in SCHEDULE_SEAMS if not hasattr(schedules, name)]
    if not moved:
        differ = (_arguments() | {_FORCES_REDUCTION}) ^ set(ARGUMENTS)
        moved = sorted(f"the argument {name}" for name in differ)
    if moved:
        raise TeraPipeError(
            f"megatron-core: found version {megatron.core.__version__}, whose schedules differ in "
            f"{', '.join(moved)}, allowed is {TESTED['megatron-core']}; install that version"
        )


def finalize_gradients(
    config: Any, model: Any, tokens: Any, groups: Any, *, force_all_reduce: bool | None
) -> None:
    """Calls ``finalize_model_grads_func`` as the installed release's schedules do.

    Args:
        config: the model's, with that function.
        model: with its wrappers.
        tokens: the step's, None where the loss is no sum over tokens.
        groups: as :func:`process_groups`.
        force_all_reduce: as megatron's schedules take it since 0.16.
    """
    known = _arguments()
    forced = {_FORCES_REDUCTION: force_all_reduce} if _FORCES_REDUCTION in known else {}
    config.finalize_model_grads_func([model], tokens, pg_collection=groups, **forced)


def _arguments() -> set[str]:
    stock = schedules.forward_backward_pipelining_without_interleaving
    return set(inspect.signature(stock).parameters)


def process_groups() -> ProcessGroupCollection:
    """The groups that megatron's schedules take from ``parallel_state`` if they are given none."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


def loss_of(model: Any, output: Any, loss_func: Any, call: Any, *, is_last: bool) -> Any:
    """megatron's loss of a micro-batch, and its number of tokens.

    Stops the timer ``forward-compute`` and tells experts what their losses are multiplied with.

    Args:
        model: with its wrappers.
        output: of the model, joined.
        loss_func: the script's.
        call: the schedule's arguments and state, see ``megatron_step.Call``.
        is_last: whether this is the last stage, which has a loss.
    """
    return schedules.forward_step_calc_loss(
        model,
        output,
        loss_func,
        call.config,
        None,
        call.collect_non_loss_data,
        call.micro_batches,
        call.results,
        # Context parallelism is refused.
        cp_group_size=1,
        is_last_stage=is_last,
    )


__all__ = [
    "ARGUMENTS",
    "SCHEDULE_SEAMS",
    "check_seams",
    "finalize_gradients",
    "loss_of",
    "process_groups",
    "schedules",
]
