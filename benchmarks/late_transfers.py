"""Transfers between two ranks on one GPU that keep NCCL's rules of streams and memory.

gloo's copies through the host are done when a send returns, which would hide a buffer that is freed
or read too early. Here, as with NCCL, a transfer is work on a stream of its own that starts late;
nothing but the tensor's owner keeps its memory; and ``wait`` makes the current stream wait, not the
host. On a CPU a thread takes the stream's part, and keeps the tensor too: what a send leaves to be
overwritten shows there, what it leaves to be freed does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.runtime import channel

# By how much a transfer starts late: about 1 ms of a GPU's cycles, and on a CPU.
_LATE_CYCLES = 2_000_000
_LATE_S = 1e-3


@contextmanager
def late_transfers() -> Iterator[list[Any]]:
    """Engines that are built inside send and receive so, for as long as they live.

    Yields:
        Every pair's group that was made, in order.
    """
    original = channel.pair_group
    made: list[Any] = []

    def late(name: str, rank_in_pair: int, timeout_s: float, device: torch.device) -> Any:
        group = original(name, rank_in_pair, timeout_s, torch.device("cpu"))
        made.append(_Late(group) if device.type == "cpu" else _LateOnStream(group, device))
        return made[-1]

    channel.pair_group = late
    try:
        yield made
    finally:
        channel.pair_group = original


class _Work:
    """A transfer, as a ``torch.distributed.Work`` is waited for."""

    def __init__(self, done: Future[Any]) -> None:
        self._done = done

    def wait(self) -> None:
        event = self._done.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class _Late:
    """On a CPU: one thread carries a pair's messages, one after another."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="late-transfers")

    def rank(self) -> int:
        return self._group.rank()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors

        def later() -> None:
            time.sleep(_LATE_S)
            self._group.send([tensor.detach().clone()], peer, tag).wait()

        return _Work(self._thread.submit(later))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        copy = torch.empty_like(tensor)
        work = self._group.recv([copy], peer, tag)

        def later() -> None:
            work.wait()
            time.sleep(_LATE_S)
            tensor.copy_(copy)

        return _Work(self._thread.submit(later))


class _LateOnStream(_Late):
    """On a GPU: copies on one more stream; the thread only carries host memory over gloo."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        copy = _pinned_like(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Enqueued now, from the bare address: nothing here holds the tensor until it is read.
        read = self._copy_late(copy, tensor)

        def later() -> None:
            read.synchronize()
            self._group.send([copy], peer, tag).wait()

        # A failure shows on the peer, which waits for this message.
        self._thread.submit(later)
        done: Future[Any] = Future()
        done.set_result(read)
        return _Work(done)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        copy = _pinned_like(tensor)
        work = self._group.recv([copy], peer, tag)
        posted = torch.cuda.current_stream(self._device).record_event()

        def later() -> Any:
            work.wait()
            self._stream.wait_event(posted)
            return self._copy_late(tensor, copy)

        return _Work(self._thread.submit(later))

    def _copy_late(self, target: Tensor, source: Tensor) -> Any:
        with torch.cuda.stream(self._stream), torch.no_grad():
            torch.cuda._sleep(_LATE_CYCLES)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
