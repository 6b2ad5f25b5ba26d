"""What ranks run in the tests of the CUDA check: its parts on a CPU, with something changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional

from terapipe_ds.runtime import attention, channel, kv_context, recorder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def lines_of(part: str, change: str, folder: Path) -> list[tuple[str, bool]]:
    """Each line of a part, and whether it is ok, where something has been changed."""
    sys.path.insert(0, str(BENCHMARKS))
    import cuda_check_parts as parts

    rig = parts.set_up("cpu", folder)
    CHANGES[change]()
    return [(line.what, line.ok) for line in parts.PARTS[part](rig)]


def dropped_gradients() -> None:
    """dK and dV of later slices never reach earlier tokens."""
    kv_context.LayerKV.exchange_gradients = lambda *_, **__: [None, None]


def top_left() -> None:
    """The causal mask's diagonal ends in the wrong corner."""

    def sdpa(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return output.permute(2, 0, 1, 3)

    attention.sdpa = sdpa


def other_draws() -> None:
    """A recomputed forward does not get its random states back."""

    def checkpoint(function: Callable[..., Any], _: bool, *tensors: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(
            function, *tensors, use_reentrant=True, preserve_rng_state=False
        )

    tensor_parallel.checkpoint = checkpoint


def read_too_early() -> None:
    """Received tensors are used before they have come."""

    class Done:
        def wait(self) -> None:
            return None

    receive = channel.RecvChannel.receive

    def early(self: Any) -> Any:
        wait, works, tensors = self._posted[0]
        self._posted[0] = (wait, [Done() for _ in works], tensors)
        return receive(self)

    channel.RecvChannel.receive = early


def overwritten_too_early() -> None:
    """A gradient that is still being sent is written to."""
    post = channel.SendChannel._post

    def overwrite(self: Any, tensor: Tensor, wait: Any) -> None:
        post(self, tensor, wait)
        if "gradient" in wait.what:
            tensor.fill_(float("nan"))

    channel.SendChannel._post = overwrite


def kept_context() -> None:
    """Something holds on to the keys and values of every micro-batch."""
    kept = []
    original = kv_context.LayerKV.__init__

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        kept.append(self)

    kv_context.LayerKV.__init__ = keep


def wrong_clock() -> None:
    """Recorded times run ten times too fast."""
    recorder._HostClock.seconds = lambda _, moment: 10 * moment


def through_the_host() -> None:
    """No fault: slices travel as they do where tensors are on a GPU."""
    original = channel.pair_group

    def pair_group(name: str, rank_in_pair: int, timeout_s: float, _: torch.device) -> Any:
        return original(name, rank_in_pair, timeout_s, torch.device("meta"))

    channel.pair_group = pair_group


CHANGES = {
    change.__name__: change
    for change in (
        dropped_gradients,
        top_left,
        other_draws,
        read_too_early,
        overwritten_too_early,
        kept_context,
        wrong_clock,
        through_the_host,
    )
}
