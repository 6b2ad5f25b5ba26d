"""Bytes that a stage holds in a step of ours: what autograd keeps, and keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Held:
    """The most bytes at the end of any forward or backward of a step.

    Attributes:
        activations: what autograd keeps for backwards, keys and values, and parameters, apart;
            storages that several nodes keep count once.
        kv: keys and values of sequences that are cut.
        kv_grads: their gradients.
    """

    activations: int = 0
    kv: int = 0
    kv_grads: int = 0


@contextmanager
def held_bytes(engine: Any) -> Iterator[Held]:
    """Counts, by hooks on saved tensors, what the step inside holds.

    Args:
        engine: a ``TokenSliceEngine``; its instruction map is wrapped and put back.

    Yields:
        What has been held, filled in as the step runs.
    """
    found = Held()
    live: dict[int, _Storage] = {}
    parameters = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}

    def pack(tensor: Tensor) -> Any:
        pointer = tensor.untyped_storage().data_ptr()
        return tensor if pointer in parameters else _Kept(live, tensor)

    def sample() -> None:
        step = engine._step
        groups = [] if step is None else step.groups
        layers = [layer for group in groups for layer in group.context.layers()]
        kv = _storages(tensor for layer in layers for tensor in (layer.key, layer.value))
        grads = _storages(grad for layer in layers for grad in layer._gradients if grad is not None)
        others = [kept.size for pointer, kept in live.items() if pointer not in kv]
        found.activations = max(found.activations, sum(others))
        found.kv = max(found.kv, sum(kv.values()))
        found.kv_grads = max(found.kv_grads, sum(grads.values()))

    original = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {
        kind: _followed_by(sample, method) for kind, method in original.items()
    }
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield found
    finally:
        del engine._INSTRUCTION_MAP


@dataclass
class _Storage:
    size: int
    keepers: int = 0


class _Kept:
    """A tensor that autograd keeps, until its node is freed."""

    def __init__(self, live: dict[int, _Storage], tensor: Tensor) -> None:
        # Detached: a node that keeps its own output would keep itself.
        self.tensor, self._live = tensor.detach(), live
        storage = tensor.untyped_storage()
        self._pointer = storage.data_ptr()
        live.setdefault(self._pointer, _Storage(storage.nbytes())).keepers += 1

    def __del__(self) -> None:
        storage = self._live[self._pointer]
        storage.keepers -= 1
        if not storage.keepers:
            del self._live[self._pointer]


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _followed_by(sample: Any, method: Any) -> Any:
    def run(engine: Any, **kwargs: Any) -> None:
        method(engine, **kwargs)
        sample()

    return run
