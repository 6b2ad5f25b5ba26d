"""Every private name of DeepSpeed that this package relies on, in one place.

Read from DeepSpeed 0.19.8, and 0.19.4 where it differs; torch's are in ``torch_seams.py``.
``check_seams`` fails loudly where one has moved; ``tests/runtime/test_seams.py`` calls it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from ..errors import TeraPipeError
from ..versions import TESTED, numbers

__all__ = [
    "PIPELINE_ENGINE_SEAMS",
    "autocast_if_enabled",
    "check_seams",
    "gloo_carries_device_tensors",
    "is_dual_pipe",
    "let_gloo_carry_device_tensors",
    "load_ds_config",
    "own_schedule",
    "pipeline_engine_is",
    "recomputes_on_a_stream",
    "recomputes_reentrantly",
    "stock_initialize",
    "without_gradient_hooks",
]

# By name: in ``deepspeed.comm``, ``torch`` is torch itself.
_ds_comm = importlib.import_module("deepspeed.comm.torch")
_STAGES_ON_HOST = hasattr(_ds_comm, "_needs_cpu_staging")

# What the engine overrides or calls: a schedule for each kind of step, the map from instructions to
# methods, and the hooks around a backward that zero and mixed-precision optimizers rely on.
PIPELINE_ENGINE_SEAMS = (
    (PipelineEngine, "_train_schedule"),
    (PipelineEngine, "_inference_schedule"),
    (PipelineEngine, "_exec_schedule"),
    (PipelineEngine, "_INSTRUCTION_MAP"),
    (PipelineEngine, "_next_batch"),
    (PipelineEngine, "_aggregate_total_loss"),
    (PipelineEngine, "_reduce_outputs"),
    (PipelineEngine, "_bcast_pipe_scalar"),
    (DeepSpeedEngine, "_backward_prologue"),
    (DeepSpeedEngine, "_backward_epilogue"),
    (p2p, "send"),
    (p2p, "recv"),
)

# DeepSpeed before 0.19.8 makes its schedule inside of the first, see ``own_schedule``.
_MADE_INSIDE = {
    "_train_schedule": ("train_batch", "TrainSchedule"),
    "_inference_schedule": ("eval_batch", "InferenceSchedule"),
}


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    if name not in _MADE_INSIDE:
        return False
    function, schedule = _MADE_INSIDE[name]
    return schedule in getattr(owner, function).__code__.co_names


def check_seams() -> None:
    """Raises where the installed DeepSpeed lacks a name that this package overrides or calls.

    Raises:
        TeraPipeError: names what is missing and the version that is known to work.
    """
    missing = [
        f"{owner.__name__}.{name}" for owner, name in PIPELINE_ENGINE_SEAMS if not _has(owner, name)
    ]
    if not hasattr(deepspeed, "PipelineEngine"):
        missing.append("deepspeed.PipelineEngine")
    if missing:
        raise TeraPipeError(
            f"deepspeed: found version {deepspeed.__version__} without {', '.join(missing)}, "
            f"allowed is {TESTED['deepspeed']}; install that version"
        )


@contextmanager
def pipeline_engine_is(engine_class: type[PipelineEngine]) -> Iterator[None]:
    """Inside, ``deepspeed.initialize`` builds ``engine_class`` for a ``PipelineModule``.

    ``deepspeed.initialize`` has no registry of engines; it looks this name up when it is called.
    """
    before = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = before


def own_schedule(engine: Any, pipe_schedule: Any) -> Any:
    """The engine's own schedule, where DeepSpeed has not asked for it.

    Before 0.19.8, ``train_batch`` and ``eval_batch`` hand a stock schedule to ``_exec_schedule``.
    """
    if isinstance(pipe_schedule, ds_schedule.TrainSchedule):
        return engine._train_schedule()
    if isinstance(pipe_schedule, ds_schedule.InferenceSchedule):
        return engine._inference_schedule(pipe_schedule.micro_batches)
    return pipe_schedule


def recomputes_reentrantly(module: Any) -> bool:
    """Whether a ``PipelineModule`` recomputes segments that need an input with a gradient."""
    return (
        module.activation_checkpoint_interval > 0
        and module.activation_checkpoint_func is not non_reentrant_checkpoint
    )


def recomputes_on_a_stream() -> bool:
    """Whether DeepSpeed's non-reentrant checkpoint opens a stream here that the device lacks.

    Before 0.19.8 it does on CPUs, and fails.
    """
    return get_accelerator().Stream is None and numbers(deepspeed.__version__) < (0, 19, 8)


def is_dual_pipe(module: Any) -> bool:
    """Whether a module is a ``DualPipeVModule``, which DeepSpeed has since 0.19.8."""
    try:
        dualpipev = importlib.import_module("deepspeed.runtime.pipe.dualpipev")
    except ModuleNotFoundError:
        return False
    return isinstance(module, dualpipev.DualPipeVModule)


def let_gloo_carry_device_tensors() -> None:
    """Lets DeepSpeed send device tensors over gloo, through the host; for good.

    For two ranks on one GPU, which NCCL refuses: ``benchmarks/cuda_check.py`` runs so. Call it
    before a pipeline engine is built, stock or sliced; ``pair_group`` does the same for slices.

    DeepSpeed has such copies for MPS tensors, which serve its collectives here. Between stages they
    do not: they write a tensor that was sent back over itself, which autograd takes for a change.

    Two more things to know there, of DeepSpeed 0.19.8 and torch 2.13:

    - start torch's process group first (``torch.distributed.init_process_group("gloo")``):
      ``deepspeed.init_distributed`` would bind a device to it, and ``new_group`` then calls
      ``perform_nocolor_split`` on ranks that are not in the group, which gloo does not have;
    - build models with tied layers under ``torch.no_grad()``: ``PipelineModule`` broadcasts the
      tied parameters themselves, and the copy back from the host is a write in place.

    Raises:
        TeraPipeError: for a DeepSpeed without such copies, such as 0.19.4.
    """
    if not _STAGES_ON_HOST:
        raise TeraPipeError(
            f"deepspeed: found version {deepspeed.__version__}, which sends no device tensors over "
            "gloo, allowed is 0.19.8 for two ranks on one GPU; install that"
        )
    if _ds_comm._needs_cpu_staging is _is_on_a_device:
        return
    _ds_comm._needs_cpu_staging = _is_on_a_device
    p2p.send, p2p.recv = _sent_from_host(p2p.send), _received_on_host(p2p.recv)


def gloo_carries_device_tensors() -> bool:
    """Whether DeepSpeed's own messages would get over gloo from where its tensors live."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" or not _STAGES_ON_HOST:
        return accelerator.device_name() == "cpu"
    return _ds_comm._needs_cpu_staging(torch.empty(0, device=accelerator.current_device_name()))


def _is_on_a_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _sent_from_host(send: Callable[..., Any]) -> Callable[..., Any]:
    def run(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
        return send(tensor.detach().to("cpu", copy=True), dest_stage, async_op)

    return run


def _received_on_host(recv: Callable[..., Any]) -> Callable[..., Any]:
    def run(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> Any:
        copy = torch.empty_like(tensor, device="cpu")
        result = recv(copy, src_stage, async_op)
        with torch.no_grad():
            tensor.copy_(copy)
        return result

    return run


# Where the integrations' ``deepspeed.initialize`` keeps DeepSpeed's own.
STOCK = "terapipe_ds_stock"


def stock_initialize() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """DeepSpeed's own ``initialize``, whatever the name ``deepspeed.initialize`` stands for now."""
    return getattr(deepspeed.initialize, STOCK, deepspeed.initialize)


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, gradients accumulate without telling the optimizers that listen to them.

    ZeRO and DeepSpeed's BF16 optimizer listen by ``register_post_accumulate_grad_hook``
    (``deepspeed/utils/torch.py``).
    """
    kept = []
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
