"""What is global: the arguments, and the states from which dropout draws."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_args: argparse.Namespace | None = None


def set_args(args: argparse.Namespace) -> None:
    global _args
    _args = args


def get_args() -> argparse.Namespace:
    assert _args is not None, "the arguments are not set"
    return _args


class Tracker:
    """Random states of its own, so that dropout does not depend on what else has drawn."""

    def __init__(self, seed: int) -> None:
        self._states = {"dropout": torch.Generator().manual_seed(seed).get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self._states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = states

    @contextmanager
    def fork(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states["dropout"])
        try:
            yield
        finally:
            self._states["dropout"] = torch.get_rng_state()
            torch.set_rng_state(outside)


_tracker = Tracker(17)


def get_cuda_rng_tracker() -> Tracker:
    return _tracker
