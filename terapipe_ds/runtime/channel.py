"""Transfers of slices between neighbouring stages, asynchronous on both sides.

Two neighbours share two process groups, one for activations and one for gradients. In a group all
messages go one way, so they arrive in the order in which they were sent, and a receive that waits
holds up nothing that goes the other way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RankFailure, TeraPipeError
from .boundary import MESSAGE_SIZE, Boundary
from .torch_seams import pair_group
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
    rank: int,
    stage: int,
    *,
    upstream: Peer | None,
    downstream: Peer | None,
    watchdog: Watchdog,
    device: torch.device,
) -> tuple[Link | None, Link | None]:
    """Connects this rank with its neighbours; all ranks of the pipeline call it once an engine.

    Pairs are made evens first, so that start-up does not grow with the number of stages: the pairs
    (0, 1), (2, 3), ... all at once, then (1, 2), (3, 4), ...

    Args:
        rank: this rank.
        stage: its stage.
        upstream: the stage before, if any.
        downstream: the stage after, if any.
        watchdog: watches the waits. Transfers fail by themselves after twice its time only, since
            it has more to say.
        device: where tensors that are sent live.

    Returns:
        The links upstream and downstream.
    """
    engine = next(_engines_made)

    def connect(peer: Peer | None) -> Link | None:
        if peer is None:
            return None
        first, second = sorted((rank, peer.rank))
        in_pair = int(rank == second)
        wait = Wait("a connection", str(peer))
        groups = []
        for what in ("activations", "gradients"):
            with watchdog.waiting(wait), _failures_named(wait, watchdog):
                name = f"engine{engine}/{first}-{second}/{what}"
                group = pair_group(name, in_pair, 2 * watchdog.timeout_s, device)
                # NCCL connects at the first message, and blocks until the peer has one too. Both
                # have one now; in a step they would not, at the same time.
                greeting = torch.zeros(1, device=device)
                work = group.recv([greeting], 0, 0) if in_pair else group.send([greeting], 1, 0)
                work.wait()
            groups.append(group)
        return Link(peer, *groups)

    if stage % 2 == 0:
        to_downstream = connect(downstream)
        return connect(upstream), to_downstream
    to_upstream = connect(upstream)
    return to_upstream, connect(downstream)


def measure_round_trips(
    stage: int,
    upstream: Link | None,
    downstream: Link | None,
    sizes: Sequence[int],
    *,
    device: torch.device,
    repeats: int = 7,
) -> list[tuple[float, float]]:
    """Times messages down to the next stage and back, between steps; all stages call it.

    Args:
        stage: this stage.
        upstream: as :func:`links` gave it.
        downstream: as :func:`links` gave it.
        sizes: of the messages, in bytes.
        device: where tensors that are sent live.
        repeats: round trips of a size; the median counts.

    Returns:
        (bytes, ms one way) for each size; empty on the last stage.
    """

    def exchange(link: Link, size: int, *, first: bool) -> float:
        message = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            if first:
                link.activations.send([message], 1, 0).wait()
                link.gradients.recv([message], 1, 0).wait()
            else:
                link.activations.recv([message], 0, 0).wait()
                link.gradients.send([message], 0, 0).wait()
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
            times.append((time.perf_counter() - start) * 1e3 / 2)
        return median(times)

    samples: list[tuple[float, float]] = []
    for link in (downstream, upstream) if stage % 2 == 0 else (upstream, downstream):
        if link is None:
            continue
        first = link is downstream
        timed = [(float(size), exchange(link, size, first=first)) for size in sizes]
        if first:
            samples = timed
    return samples


class SendChannel:
    """Sends slices to one neighbour.

    Args:
        what: ``"activation"`` or ``"gradient"``, for messages.
        peer: the neighbour.
        group: the process group of this pair and direction.
        watchdog: watches the waits.
    """

    def __init__(self, what: str, peer: Peer, group: Any, watchdog: Watchdog) -> None:
        self._group, self._watchdog = group, watchdog
        self._peer_rank = 1 - group.rank()
        # Made once: there is a message for every slice.
        self._what = (f"room to send the {what}", str(peer))
        # Keeps the tensors alive that are still being sent.
        self._unfinished: deque[tuple[Any, Tensor, Wait]] = deque()

    def send(self, tensors: Iterable[Tensor], micro_batch: int, slice_index: int) -> None:
        """Posts the tensors of one slice."""
        wait = Wait(*self._what, micro_batch, slice_index)
        for tensor in tensors:
            self._post(tensor.detach().contiguous(), wait)
        while len(self._unfinished) > _UNFINISHED_SENDS:
            self._finish_oldest()

    def send_boundary(self, boundary: Boundary, device: torch.device) -> None:
        """Posts the description of what will be sent."""
        wait = Wait("room to send the boundary", self._what[1])
        self._post(boundary.encode().to(device), wait)

    def drain(self) -> None:
        """Waits until all sends are done."""
        while self._unfinished:
            self._finish_oldest()

    def _post(self, tensor: Tensor, wait: Wait) -> None:
        with _failures_named(wait, self._watchdog):
            work = self._group.send([tensor], self._peer_rank, 0)
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
        self._group, self._watchdog, self._device = group, watchdog, device
        self._peer_rank = 1 - group.rank()
        self._what = (f"the {what}", str(peer))
        self._boundary: Boundary | None = None
        self._upcoming: Iterator[Slot] = iter(())
        self._posted: deque[tuple[Wait, list[Any], tuple[Tensor, ...]]] = deque()

    def begin(self, slots: Iterable[Slot], boundary: Boundary | None) -> None:
        """Starts a step.

        Args:
            slots: every message of the step, in order.
            boundary: what a message holds; None if :meth:`recv_boundary` will tell.
        """
        if self._posted:
            raise TeraPipeError(
                "an earlier step was left half done; its messages would meet this step's, so the "
                "job has to be started again"
            )
        self._upcoming = iter(slots)
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
        wait = Wait("the boundary's description", self._what[1])
        with self._watchdog.waiting(wait), _failures_named(wait, self._watchdog):
            self._group.recv([message], self._peer_rank, 0).wait()
        return Boundary.decode(message)

    def receive(self) -> tuple[Tensor, ...]:
        """Waits for the tensors of the next slice."""
        wait, works, tensors = self._posted.popleft()
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
            sizes = self._boundary.sizes(slot.sequences, slot.tokens)
            tensors = tuple(
                torch.empty(size, dtype=template.dtype, device=self._device)
                for size, template in zip(sizes, self._boundary.tensors, strict=True)
            )
            wait = Wait(*self._what, slot.micro_batch, slot.slice)
            with _failures_named(wait, self._watchdog):
                works = [self._group.recv([tensor], self._peer_rank, 0) for tensor in tensors]
            self._posted.append((wait, works, tensors))


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
