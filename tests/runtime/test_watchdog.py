"""The watchdog: what it says, and when it ends the process, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from terapipe_ds.runtime.watchdog import Wait, Watchdog

TIMEOUT_S = 1.0

PROGRAM = f"""
import sys
import time
from torch.distributed import HashStore
from terapipe_ds.runtime.watchdog import Wait, Watchdog

store = HashStore()
watchdog = Watchdog("rank 2 (stage 1)", timeout_s={TIMEOUT_S}, store=store)
other = Watchdog("rank 0 (stage 0)", timeout_s={TIMEOUT_S}, store=store)
wait = Wait("activations", "rank 1 (stage 0)", micro_batch=3, slice=5)

class LostStore(HashStore):
    # Fails at every look, or lets each fourth one through.
    looks = 0
    def __init__(self, for_ever):
        super().__init__()
        self.for_ever = for_ever
    def check(self, keys):
        self.looks += 1
        if self.for_ever or self.looks % 4:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)

print(time.time(), flush=True)
"""


def run(body: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The process that ended, and the seconds from its first line to its end."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + body], capture_output=True, text=True, timeout=60
    )
    return ended, time.time() - float(ended.stdout.split()[0])


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (
            Wait("activations", "rank 1 (stage 0)", 3, 5),
            "activations of micro-batch 3, slice 5, from rank 1 (stage 0)",
        ),
        (
            Wait("gradients", "rank 9 (stage 2)", 0, 0),
            "gradients of micro-batch 0, slice 0, from rank 9 (stage 2)",
        ),
        (Wait("the header", "rank 0 (stage 0)"), "the header from rank 0 (stage 0)"),
    ],
)
def test_wait_as_text(wait: Wait, text: str) -> None:
    assert str(wait) == text


def test_announce_sets_the_key_for_all() -> None:
    store = HashStore()
    assert not store.check(["terapipe_ds/abort"])
    Watchdog("rank 2 (stage 1)", timeout_s=1, store=store).announce("out of memory")
    assert store.get("terapipe_ds/abort") == b"rank 2 (stage 1): out of memory"


def test_announce_survives_a_lost_store() -> None:
    calls = []

    class Lost:
        def set(self, *args: Any) -> None:
            calls.append(args)
            raise RuntimeError("Connection reset by peer")

    Watchdog("rank 2 (stage 1)", timeout_s=1, store=Lost()).announce("why")  # type: ignore[arg-type]
    assert calls == [("terapipe_ds/abort", "rank 2 (stage 1): why")]


def test_a_wait_that_is_too_long_ends_the_process() -> None:
    """Within the timeout, though the main thread hangs, and the other ranks hear of it."""
    ended, seconds = run(
        """
import os
leave = os._exit
def look_and_leave(code):
    print(store.get("terapipe_ds/abort").decode(), flush=True)
    leave(code)
os._exit = look_and_leave
with watchdog.step(), watchdog.waiting(wait):
    time.sleep(30)
"""
    )
    reason = (
        "rank 2 (stage 1) waited 1 s for activations of micro-batch 3, slice 5, from "
        "rank 1 (stage 0); that rank is stuck or gone, see its output (terapipe.timeout_s sets the "
        "longest wait)"
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [f"terapipe-ds: {reason}"]
    assert ended.stdout.splitlines()[1] == reason.replace(" waited", ": waited")
    # Four of twenty intervals early; the upper end leaves room for a busy machine.
    assert 0.8 * TIMEOUT_S <= seconds <= TIMEOUT_S + 2


def test_a_wait_ends_though_the_host_of_the_store_is_frozen() -> None:
    """Neither looking for failures nor telling the others may hold it up."""
    ended, seconds = run(
        """
class Frozen:
    def check(self, keys):
        time.sleep(60)
    def set(self, key, value):
        time.sleep(60)
watchdog._store = Frozen()
with watchdog.step(), watchdog.waiting(wait):
    time.sleep(30)
"""
    )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "waited 1 s for activations" in ended.stderr
    assert seconds <= TIMEOUT_S + 2


def test_a_failure_on_another_rank_ends_the_process() -> None:
    ended, seconds = run(
        """
with watchdog.step():
    with watchdog.waiting(wait):
        other.announce("CUDA out of memory")
        time.sleep(30)
"""
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "terapipe-ds: rank 2 (stage 1) ends while it waited for activations of micro-batch 3, "
        "slice 5, from rank 1 (stage 0), because of a failure on "
        "rank 0 (stage 0): CUDA out of memory"
    ]
    assert seconds <= TIMEOUT_S + 2


def test_nothing_ends_without_a_reason() -> None:
    """Outside a step neither a wait nor a failure; inside neither short waits nor computing."""
    ended, seconds = run(
        f"""
with watchdog.step():
    for _ in range(2):
        with watchdog.waiting(wait):
            time.sleep({TIMEOUT_S} / 2)
    time.sleep({TIMEOUT_S})
with watchdog.waiting(wait):
    time.sleep({TIMEOUT_S})
assert not store.check(["terapipe_ds/abort"])
other.announce("CUDA out of memory")
time.sleep({TIMEOUT_S} / 2)
print("survived")
"""
    )
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[1:] == ["survived"]
    assert ended.stderr == ""
    assert seconds >= 3.5 * TIMEOUT_S


def test_a_failure_outside_a_wait_ends_the_step_that_comes_next() -> None:
    ended, _ = run(
        """
with watchdog.step():
    pass
other.announce("lost its node")
with watchdog.step():
    time.sleep(30)
"""
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "terapipe-ds: rank 2 (stage 1) ends, because of a failure on "
        "rank 0 (stage 0): lost its node"
    ]


def test_a_store_that_is_gone_ends_the_process() -> None:
    ended, seconds = run(
        f"""
watchdog = Watchdog("rank 2 (stage 1)", timeout_s={TIMEOUT_S}, store=LostStore(for_ever=True))
with watchdog.step():
    time.sleep(30)
"""
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "terapipe-ds: rank 2 (stage 1) ends, because the ranks' store is gone: its host, usually "
        "rank 0, has ended"
    ]
    assert seconds <= TIMEOUT_S + 2


def test_a_store_that_answers_again_ends_nothing() -> None:
    ended, _ = run(
        f"""
lost = LostStore(for_ever=False)
with Watchdog("rank 2 (stage 1)", timeout_s={TIMEOUT_S}, store=lost).step():
    time.sleep({TIMEOUT_S})
print(lost.looks)
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 4


def test_a_process_that_ends_in_a_look_ends_well() -> None:
    ended, _ = run(
        """
from torch.distributed import TCPStore

class SlowStore:
    # In the store's own code for most of the time, as on a busy machine.
    def __init__(self):
        self.host = TCPStore("127.0.0.1", 0, 1, True)
    def check(self, keys):
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            self.host.check(keys)
        return False

watchdog = Watchdog("rank 0", timeout_s=TIMEOUT_S, store=SlowStore())
step = watchdog.step()
step.__enter__()
time.sleep(0.3)
""".replace("TIMEOUT_S", str(TIMEOUT_S))
    )
    assert (ended.returncode, ended.stderr) == (0, "")
