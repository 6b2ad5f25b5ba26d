"""Messages through host memory: what is sent may change at once, what is received comes at wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from terapipe_ds.runtime import torch_seams
from terapipe_ds.runtime.host_staged import HostStaged

Pair = list[Any]


def connected(device: str, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Both ends of a pair over gloo, for tensors of a device, in one process."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch_seams, "default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    ends: Pair = [None, None]

    def connect(rank: int) -> None:
        ends[rank] = torch_seams.pair_group("a pair", rank, 20, torch.device(device))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """What slices get where tensors are not on the host."""
    return connected("meta", monkeypatch)


def test_tensors_on_the_host_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in connected("cpu", monkeypatch):
        assert type(end) is torch.distributed.ProcessGroupGloo


def test_ranks(pair: Pair) -> None:
    assert all(isinstance(end, HostStaged) for end in pair)
    assert [end.rank() for end in pair] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_message(pair: Pair, dtype: torch.dtype) -> None:
    sender, receiver = pair
    sent = torch.arange(6, dtype=dtype).view(2, 3)
    found = torch.full((2, 3), -1, dtype=dtype)
    arrival = receiver.recv([found], 0, 0)
    work = sender.send([sent], 1, 0)
    sent.zero_()
    work.wait()
    assert (found == -1).all(), "written before it was waited for"
    arrival.wait()
    assert torch.equal(found, torch.arange(6, dtype=dtype).view(2, 3))


def test_messages_keep_their_order_and_the_graph_stays_behind(pair: Pair) -> None:
    sender, receiver = pair
    found = [torch.empty(3) for _ in range(4)]
    arrivals = [receiver.recv([tensor], 0, 0) for tensor in found]
    weight = torch.ones(3, requires_grad=True)
    works = [sender.send([weight * index], 1, 0) for index in range(4)]
    for waited in (*arrivals, *works):
        waited.wait()
    assert [tensor.tolist() for tensor in found] == [[float(index)] * 3 for index in range(4)]
