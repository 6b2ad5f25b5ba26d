"""When megatron's data-parallel wrapper may reduce gradients: with a step's last backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class GradientSync:
    """Keeps a step inside ``no_sync_func``, but for the last slice's backward.

    Args:
        config: megatron's.
        model: the stage, in its wrappers.
        is_first: whether this is the first stage.
        splits_backward: whether weights' gradients come after the last backward.
    """

    def __init__(
        self, config: Any, model: nn.Module, *, is_first: bool, splits_backward: bool
    ) -> None:
        self._config, self._model = config, model
        # As megatron: with grad_sync_func, only the first stage reduces while it computes. Weights'
        # gradients that come in pieces after the last backward would each be taken for the last.
        self._overlaps = (config.grad_sync_func is None or is_first) and not splits_backward
        self._outside: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        """Before the first slice."""
        self._outside = (self._config.no_sync_func or nullcontext)()
        self._outside.__enter__()

    def before_last_backward(self) -> None:
        """Lets the last backward reduce gradients as they come."""
        if self._overlaps:
            self._leave()

    def finish(self) -> None:
        """After the last slice: starts what has not been reduced yet."""
        if self._outside is None:
            return
        self._leave()
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        elif hasattr(self._model, "start_grad_sync") and self._model.ddp_config.overlap_grad_reduce:
            self._model.start_grad_sync()

    def _leave(self) -> None:
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self._outside = None


__all__ = ["GradientSync"]
