"""Messages of device tensors through host memory, for gloo, which reads and writes no other.

gloo hands a tensor's address to a socket (``ProcessGroupGloo::send`` and ``recv``, torch 2.13),
whatever the device; for a GPU's memory the kernel answers "Bad address". NCCL, in turn, refuses two
ranks on one GPU. So a pipeline can be tried on one GPU over gloo alone, with copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostStaged:
    """A pair's process group that sends and receives host copies of device tensors.

    Args:
        group: with ``rank``, ``send`` and ``recv`` as ``torch.distributed.ProcessGroupGloo``.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        """This rank's place in the pair."""
        return self._group.rank()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Posts copies, made after all that the current stream still computes.

        The tensors themselves are free when this returns.

        Returns:
            gloo's work, which keeps the copies alive.
        """
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return self._group.send(copies, peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Arrival:
        """Posts a receive; the tensors are written by the ``wait`` of what it returns."""
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Arrival(self._group.recv(copies, peer, tag), tensors, copies)


class Arrival:
    """A posted receive into host memory, as a ``torch.distributed.Work`` is waited for."""

    def __init__(self, work: Any, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._work, self._tensors, self._copies = work, tensors, copies

    def wait(self) -> None:
        """Waits for the message and copies it to its tensors, in order with the current stream."""
        self._work.wait()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


__all__ = ["Arrival", "HostStaged"]
