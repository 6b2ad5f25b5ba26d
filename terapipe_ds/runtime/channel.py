"""Transfers of slices between neighbouring stages, asynchronous on both sides.

Every neighbour pair has one process group for each direction. The order of messages is then the
order of sends, a posted receive can neither block a send nor meet another's message, on gloo and
on eagerly started NCCL alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RankFailure
from .boundary import MESSAGE_SIZE, Boundary
from .deepspeed_seams import pair_group
from .watchdog import Wait, Watchdog

# Receives posted ahead of use. Two keep one message on the wire while another is waited for.
_POSTED_AHEAD = 2
# Sends that may be unfinished before a new one waits for the oldest: a bound on the memory that
# sends keep alive. The peer has by then posted, or will post without this rank's help, all but the
# last few receives, so that such a wait ends.
_UNFINISHED_SENDS = 16


class Peer(NamedTuple):
    """A neighbouring stage."""

    rank: int
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


class Slot(NamedTuple):
    """A message's place: a slice of a micro-batch, and its size."""

    micro_batch: int
    slice: int
    sequences: int
    tokens: int


_engines_made = count()


class Link(NamedTuple):
    """The process groups with one neighbour, one a direction; this rank is 0 or 1 in both."""

    peer: Peer
    activations: Any
    gradients: Any


def links(
    rank: int, stage: int, *, upstream: Peer | None, downstream: Peer | None, timeout_s: float
) -> tuple[Link | None, Link | None]:
    """Connects this rank with its neighbours; all ranks of the pipeline call it once an engine.

    Pairs are made evens first, so that start-up does not grow with the number of stages: the pairs
    (0, 1), (2, 3), ... all at once, then (1, 2), (3, 4), ...

    Args:
        rank: this rank.
        stage: its stage.
        upstream: the stage before, if any.
        downstream: the stage after, if any.
        timeout_s: after which a transfer fails.

    Returns:
        The links upstream and downstream.
    """
    engine = next(_engines_made)

    def connect(peer: Peer | None) -> Link | None:
        if peer is None:
            return None
        first, second = sorted((rank, peer.rank))
        name = f"engine{engine}/{first}-{second}"
        return Link(
            peer,
            *(
                pair_group(f"{name}/{what}", int(rank == second), timeout_s)
                for what in ("activations", "gradients")
            ),
        )

    if stage % 2 == 0:
        to_downstream = connect(downstream)
        return connect(upstream), to_downstream
    to_upstream = connect(upstream)
    return to_upstream, connect(downstream)


class SendChannel:
    """Sends slices to one neighbour.

    Args:
        what: ``"activation"`` or ``"gradient"``, for messages.
        peer: the neighbour.
        group: the process group of this pair and direction.
        watchdog: watches the waits.
    """

    def __init__(self, what: str, peer: Peer, group: Any, watchdog: Watchdog) -> None:
        self._what, self._peer, self._group, self._watchdog = what, peer, group, watchdog
        # A send's tensor lives here until the send is done.
        self._unfinished: deque[tuple[Any, Tensor, Wait]] = deque()

    def send(self, tensors: Iterable[Tensor], micro_batch: int, slice_index: int) -> None:
        """Posts the tensors of one slice."""
        wait = Wait(f"room to send the {self._what}", str(self._peer), micro_batch, slice_index)
        for tensor in tensors:
            self._post(tensor.detach().contiguous(), wait)
        while len(self._unfinished) > _UNFINISHED_SENDS:
            self._finish_oldest()

    def send_boundary(self, boundary: Boundary, device: torch.device) -> None:
        """Posts the description of what will be sent."""
        wait = Wait("room to send the boundary", str(self._peer))
        self._post(boundary.encode().to(device), wait)

    def drain(self) -> None:
        """Waits until all sends are done."""
        while self._unfinished:
            self._finish_oldest()

    def _post(self, tensor: Tensor, wait: Wait) -> None:
        with _failures_named(wait, self._watchdog):
            work = self._group.send([tensor], 1 - self._group.rank(), 0)
        self._unfinished.append((work, tensor, wait))

    def _finish_oldest(self) -> None:
        work, _, wait = self._unfinished.popleft()
        with self._watchdog.waiting(wait), _failures_named(wait, self._watchdog):
            work.wait()


class RecvChannel:
    """Receives slices from one neighbour; the order is known before a step begins.

    Args:
        what: ``"activation"`` or ``"gradient"``, for messages.
        peer: the neighbour.
        group: the process group of this pair and direction.
        watchdog: watches the waits.
        device: where the tensors go.
    """

    def __init__(
        self, what: str, peer: Peer, group: Any, watchdog: Watchdog, device: torch.device
    ) -> None:
        self._what, self._peer, self._group, self._watchdog = what, peer, group, watchdog
        self._device = device
        self._boundary: Boundary | None = None
        self._upcoming: Iterator[Slot] = iter(())
        self._posted: deque[tuple[Slot, list[Any], tuple[Tensor, ...]]] = deque()

    def begin(self, slots: Iterable[Slot], boundary: Boundary | None) -> None:
        """Starts a step.

        Args:
            slots: every message of the step, in order.
            boundary: what a message holds; None if :meth:`recv_boundary` will tell.
        """
        self._upcoming = iter(slots)
        self._posted.clear()
        self._boundary = boundary
        if boundary is not None:
            self._post_ahead()

    def learn(self, boundary: Boundary) -> None:
        """Gives what a message holds, where :meth:`begin` did not know it yet."""
        self._boundary = boundary
        self._post_ahead()

    def recv_boundary(self) -> Boundary:
        """Waits for the description of what will be received."""
        message = torch.empty(MESSAGE_SIZE, dtype=torch.int64, device=self._device)
        wait = Wait("the boundary's description", str(self._peer))
        with self._watchdog.waiting(wait), _failures_named(wait, self._watchdog):
            self._group.recv([message], 1 - self._group.rank(), 0).wait()
        return Boundary.decode(message)

    def receive(self) -> tuple[Tensor, ...]:
        """Waits for the tensors of the next slice."""
        slot, works, tensors = self._posted.popleft()
        wait = Wait(f"the {self._what}", str(self._peer), slot.micro_batch, slot.slice)
        with self._watchdog.waiting(wait), _failures_named(wait, self._watchdog):
            for work in works:
                work.wait()
        self._post_ahead()
        return tensors

    def _post_ahead(self) -> None:
        assert self._boundary is not None
        while len(self._posted) < _POSTED_AHEAD:
            slot = next(self._upcoming, None)
            if slot is None:
                return
            tensors = tuple(
                torch.empty(
                    template.size(slot.sequences, slot.tokens),
                    dtype=template.dtype,
                    device=self._device,
                )
                for template in self._boundary.tensors
            )
            wait = Wait(f"the {self._what}", str(self._peer), slot.micro_batch, slot.slice)
            with _failures_named(wait, self._watchdog):
                works = [
                    self._group.recv([tensor], 1 - self._group.rank(), 0) for tensor in tensors
                ]
            self._posted.append((slot, works, tensors))


class _failures_named:  # noqa: N801 - used as a context manager, cheaper than a generator
    """Turns a transfer's failure into one line that says who, what and from whom."""

    __slots__ = ("_wait", "_watchdog")

    def __init__(self, wait: Wait, watchdog: Watchdog) -> None:
        self._wait, self._watchdog = wait, watchdog

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if kind is not None and issubclass(kind, RuntimeError):
            raise RankFailure(
                f"{self._watchdog.name} lost its peer while it waited for {self._wait}: "
                f"{str(error).splitlines()[0]}; see that rank's output"
            ) from error
