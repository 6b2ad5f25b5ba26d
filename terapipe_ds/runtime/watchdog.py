"""Ends a rank that waits too long, or whose peer has failed, with a line that says for what.

A pipeline rank that stops leaves the others waiting. The watchdog knows what this rank waits for;
its thread ends the process when the wait is longer than ``timeout_s``, or when another rank has
announced its failure in the ranks' rendezvous store.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch.distributed

_ABORT_KEY = "terapipe_ds/abort"


class Wait(NamedTuple):
    """What a rank waits for."""

    what: str
    peer: str
    micro_batch: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        where = ""
        if self.micro_batch is not None:
            where = f" of micro-batch {self.micro_batch}, slice {self.slice},"
        return f"{self.what}{where} from {self.peer}"


class _Waiting:
    """A class and no generator: it stands around every message."""

    __slots__ = ("_outer", "_wait", "_watchdog")

    def __init__(self, watchdog: Watchdog, wait: Wait) -> None:
        self._watchdog, self._wait = watchdog, wait

    def __enter__(self) -> None:
        self._outer = self._watchdog._wait
        self._watchdog._wait = (time.monotonic(), self._wait)

    def __exit__(self, *_: object) -> None:
        self._watchdog._wait = self._outer


class Watchdog:
    """One rank's watch over its waits.

    Args:
        name: this rank, for messages, for example ``"rank 2 (stage 1)"``.
        timeout_s: the longest wait, in seconds.
        store: the ranks' rendezvous store, to announce and hear of failures.
    """

    def __init__(self, name: str, *, timeout_s: float, store: torch.distributed.Store) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._store = store
        self._wait: tuple[float, Wait] | None = None
        self._steps = 0
        self._interval = min(0.5, timeout_s / 20)
        self._lost_looks = 0
        self._host_is_gone = False
        self._announced = False
        self._threads: list[threading.Thread] = []
        # Held for each look into the store, and for good when Python ends.
        self._looking = threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watches while a step runs; other ranks' failures end this process only inside."""
        if not self._threads:
            # Two: a look into the store blocks where its host is frozen or cut off.
            self._threads = [
                threading.Thread(target=target, name="terapipe-watchdog", daemon=True)
                for target in (self._run, self._listen)
            ]
            for thread in self._threads:
                thread.start()
            atexit.register(self._rest)
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
            self._wait = None

    def waiting(self, wait: Wait) -> AbstractContextManager[None]:
        """Times what is done inside as a wait; an outer wait goes on after it."""
        return _Waiting(self, wait)

    def begin(self, wait: Wait) -> None:
        """Begins a wait that :meth:`end` ends, where :meth:`waiting` cannot enclose it."""
        self._wait = (time.monotonic(), wait)

    def end(self) -> None:
        """Ends what this rank waits for."""
        self._wait = None

    def announce(self, reason: str) -> None:
        """Tells all ranks that this one has failed, so that they end too.

        Returns after a moment (at most 1 s), in which the others read it.
        """
        self._announced = True
        # This rank may be the store's host: the others need time to look. And its host may be gone
        # (the other ranks find that out as this one did) or frozen.
        teller = threading.Thread(target=self._tell, args=(reason,), daemon=True)
        teller.start()
        teller.join(2 * self._interval)
        if not self._host_is_gone:
            time.sleep(2 * self._interval)

    def _rest(self) -> None:
        """Lets no thread come back from the store while Python ends: that aborts the process."""
        self._looking.acquire(timeout=1.0)

    def _tell(self, reason: str) -> None:
        try:
            self._store.set(_ABORT_KEY, f"{self.name}: {reason}")
        except RuntimeError:
            self._host_is_gone = True

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            if not self._steps:
                continue
            late = self._late()
            if late is not None:
                print(f"terapipe-ds: {self.name} {late}", file=sys.stderr, flush=True)
                self.announce(late)
                os._exit(1)

    def _listen(self) -> None:
        while True:
            time.sleep(self._interval)
            # A rank that has announced its end needs to hear of no other; and torch would print a
            # trace below its last line if the store's host is gone by then.
            if not self._steps or self._announced:
                continue
            with self._looking:
                reason = self._abort_reason()
            # What this rank has announced itself it also says itself.
            if reason is not None and self._steps and not self._announced:
                print(f"terapipe-ds: {self.name} ends{reason}", file=sys.stderr, flush=True)
                # The main thread may be blocked in a transfer, where no exception reaches it.
                os._exit(1)

    def _late(self) -> str | None:
        entry = self._wait
        if entry is None:
            return None
        since, wait = entry
        # Ending a little early keeps the promise that all ranks end within timeout_s.
        if time.monotonic() - since < self.timeout_s - 4 * self._interval:
            return None
        return (
            f"waited {self.timeout_s:g} s for {wait}; that rank is stuck or gone, "
            "see its output (terapipe.timeout_s sets the longest wait)"
        )

    def _abort_reason(self) -> str | None:
        try:
            if not self._store.check([_ABORT_KEY]):
                self._lost_looks = 0
                return None
            cause = f"because of a failure on {self._store.get(_ABORT_KEY).decode()}"
        except RuntimeError:
            # The host of the store has ended. If this rank waits for a message, that fails now and
            # says more than can be said here, so it gets a moment.
            self._lost_looks += 1
            if self._lost_looks < 4:
                return None
            cause = "because the ranks' store is gone: its host, usually rank 0, has ended"
        entry = self._wait
        waited = f" while it waited for {entry[1]}" if entry is not None else ""
        return f"{waited}, {cause}"
