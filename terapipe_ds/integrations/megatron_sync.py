"""When megatron's data-parallel wrapper may reduce gradients: with a step's last backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class GradientSync:
    """Around a step: keeps it inside ``no_sync_func``, but for the last slice's backward.

    At the end starts what has not been reduced by then.

    Args:
        config: megatron's.
        model: the stage, in its wrappers.
        is_first: whether this is the first stage.
        splits_backward: whether weights' gradients come after their slice's backward.
    """

    def __init__(
        self, config: Any, model: nn.Module, *, is_first: bool, splits_backward: bool
    ) -> None:
        self._config, self._model = config, model
        # As megatron: with grad_sync_func, only the first stage reduces while it computes.
        self._early = (config.grad_sync_func is None or is_first) and not splits_backward
        self._outside: AbstractContextManager[Any] | None = None
        # megatron's wrapper counts gradients as they come, and wants each parameter to have one
        # after every backward. Where they come in pieces it has to wait for the end.
        ddp = getattr(model, "ddp_config", None)
        self._holds_back = splits_backward and ddp is not None and ddp.overlap_grad_reduce

    def __enter__(self) -> GradientSync:
        self._outside = (self._config.no_sync_func or nullcontext)()
        self._outside.__enter__()
        if self._holds_back:
            self._model.ddp_config.overlap_grad_reduce = False
        return self

    def before_last_backward(self) -> None:
        """Lets the last backward reduce gradients as they come."""
        if self._early:
            self._leave()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._holds_back:
            self._model.ddp_config.overlap_grad_reduce = True
        reduced = self._outside is None
        self._leave()
        if reduced or kind is not None:
            return
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        elif self._holds_back:
            self._model.start_grad_sync()

    def _leave(self) -> None:
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self._outside = None


__all__ = ["GradientSync"]
