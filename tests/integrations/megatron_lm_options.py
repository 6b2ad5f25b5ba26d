"""What ranks run in the tests of what megatron's schedules are given beside data and a model."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules

from terapipe_ds.integrations import megatron_step
from terapipe_ds.integrations.megatron_core import forward_backward_func
from tests.conftest import SEED

from . import megatron_lm
from .megatron_lm import LENGTH, SEQUENCES, Setting, gap, gradients, run

SETTING = Setting(pipe=2)
# Since megatron-core 0.16.
TAKES_NO_LOSS = "loss_func is None" in inspect.getsource(schedules.forward_step_calc_loss)


class Timers:
    """As Megatron-LM's: each is started once before it is stopped."""

    def __init__(self) -> None:
        self.stopped: dict[str, int] = {}
        self._running: set[str] = set()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return _Timer(self, name)


class _Timer:
    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name

    def start(self, barrier: bool = False) -> None:
        assert self._name not in self._timers._running
        self._timers._running.add(self._name)

    def stop(self) -> None:
        self._timers._running.remove(self._name)
        self._timers.stopped[self._name] = self._timers.stopped.get(self._name, 0) + 1


def options() -> dict[str, Any]:
    """What each option gives, stock and sliced."""
    megatron_lm.prepare_stock()
    megatron_lm.initialize(SETTING)
    stock, sliced = schedules.get_forward_backward_func(), forward_backward_func(SETTING.block)
    found = {}
    for name, function in (("stock", stock), ("sliced", sliced)):
        model = megatron_lm.model_of(SETTING)
        config = model.config
        run(function, SETTING, model)
        plain = gradients(model)
        config.grad_scale_func = lambda loss: 8 * loss
        run(function, SETTING, model)
        scaled = {key: grad / 8 for key, grad in gradients(model).items()}
        config.grad_scale_func = None

        synced: list[Any] = []
        config.grad_sync_func = synced.append
        run(function, SETTING, model)
        config.grad_sync_func = None
        config.timers = Timers()
        run(function, SETTING, model)
        timers, config.timers = config.timers, None
        assert not timers._running

        told: list[int] = []
        # Not on the class, which both models have.
        vars(model)["set_is_first_microbatch"] = lambda told=told: told.append(1)
        with torch.no_grad():
            evaluation = partial(run, function, SETTING, model, forward_only=True)
            evaluation(first_val_step=True)
            evaluation(first_val_step=False)
            other = _evaluate(function, model, _other_data, collect_non_loss_data=True)
            outputs = _evaluate(function, model, None) if TAKES_NO_LOSS else None
        run(function, SETTING, model)
        del model.set_is_first_microbatch
        found[name] = {
            "scaled": gap(scaled, plain),
            "synced": len(synced),
            "timers": sorted(timers.stopped),
            "first": len(told),
            "other": other,
            "outputs": outputs,
        }
    return found


def _other_data(output: Any, non_loss_data: bool) -> Any:
    assert non_loss_data
    return output.argmax(-1)


def _evaluate(function: Any, model: Any, loss_func: Any, **kwargs: Any) -> list[Any]:
    def forward_step(iterator: Any, model: Any) -> Any:
        output, _ = megatron_lm.forward_step(SETTING, iterator, model)
        return output, loss_func

    return function(
        forward_step_func=forward_step,
        data_iterator=megatron_lm.batches(SETTING),
        model=model,
        num_microbatches=SETTING.micro_batches,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
        forward_only=True,
        **kwargs,
    )


def dropout() -> dict[str, float]:
    """Sliced runs with dropout: again, with another seed, and recomputed."""
    megatron_lm.prepare_stock()
    setting = Setting(config={"hidden_dropout": 0.2, "attention_dropout": 0.2})
    megatron_lm.initialize(setting)
    recompute = {"recompute_method": "uniform", "recompute_num_layers": 1}
    sliced = forward_backward_func(setting.block)
    model = megatron_lm.model_of(setting)

    def grads(seed: int, **changes: Any) -> Any:
        for name, value in changes.items():
            setattr(model.config, name, value)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        run(sliced, setting, model)
        return gradients(model)

    first = grads(SEED)
    return {
        "again": gap(grads(SEED), first),
        "other seed": gap(grads(SEED + 1), first),
        "recomputed": gap(grads(SEED, recompute_granularity="full", **recompute), first),
    }


def slack() -> tuple[list[int], float]:
    """The slack that training and evaluation asked their order for, and how gradients differ."""
    megatron_lm.prepare_stock()
    megatron_lm.initialize(SETTING)
    asked: list[int] = []
    stock_actions = megatron_step.actions

    def noted(*args: Any, warmup: int) -> Any:
        asked.append(warmup)
        return stock_actions(*args, warmup=warmup)

    megatron_step.actions = noted
    found = []
    for warmup in (0, 2):
        model = megatron_lm.model_of(SETTING)
        run(forward_backward_func({**SETTING.block, "warmup": warmup}), SETTING, model)
        found.append(gradients(model))
    with torch.no_grad():
        function = forward_backward_func({**SETTING.block, "warmup": 2})
        run(function, SETTING, model, forward_only=True)
    return asked, gap(found[1], found[0])
