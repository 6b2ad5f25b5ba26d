"""Records when a pipeline engine, stock or sliced, ran its instructions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch.distributed
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ..schedule.instructions import BackwardInput, BackwardSlice, BackwardWeight, ForwardSlice
from ..schedule.trace import MeasuredTimeline, Span

_COMPUTE = {
    ds_schedule.ForwardPass: "F",
    ds_schedule.BackwardPass: "B",
    ForwardSlice: "F",
    BackwardSlice: "B",
    BackwardInput: "B",
    BackwardWeight: "W",
}


class _Clock(Protocol):
    def now(self) -> Any:
        """A moment, cheap to take."""

    def seconds(self, moment: Any) -> float:
        """A moment in seconds, on the machine's clock; may wait for the device."""


class _HostClock:
    def now(self) -> float:
        return time.time()

    def seconds(self, moment: float) -> float:
        return moment


class _DeviceClock:
    """Moments of the device's stream: the host only enqueues what an instruction computes."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._start = time.time()
        self._origin = self.now()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self._start + self._origin.elapsed_time(moment) / 1e3


class _Entry(NamedTuple):
    what: str
    start: Any
    stop: Any
    micro_batch: int | None
    slice: int | None


@contextmanager
def recorded(engine: PipelineEngine) -> Iterator[list[Span]]:
    """Records every instruction that the engine runs inside.

    Args:
        engine: any ``PipelineEngine``. Its instruction map is wrapped and put back.

    Yields:
        The spans of this rank, filled in at the end. Times are those of the machine's clock, so
        that ranks of one machine agree; on a GPU those of its stream.
    """
    spans: list[Span] = []
    entries: list[_Entry] = []
    clock: _Clock = _DeviceClock() if engine.device.type == "cuda" else _HostClock()
    original = engine._INSTRUCTION_MAP
    own = "_INSTRUCTION_MAP" in vars(engine)
    engine._INSTRUCTION_MAP = {
        kind: _wrapped(method, _COMPUTE.get(kind, kind.__name__), entries, clock)
        for kind, method in original.items()
    }
    try:
        yield spans
    finally:
        if own:
            engine._INSTRUCTION_MAP = original
        else:
            del engine._INSTRUCTION_MAP
        spans += [
            Span(
                entry.what,
                clock.seconds(entry.start),
                clock.seconds(entry.stop),
                entry.micro_batch,
                entry.slice,
            )
            for entry in entries
        ]


def gather(engine: PipelineEngine, spans: list[Span]) -> MeasuredTimeline:
    """Brings the spans of a pipeline's stages together, on every rank of it."""
    stages: list[Any] = [None] * engine.num_stages
    group = engine.grid.get_pipe_parallel_group()
    torch.distributed.all_gather_object(stages, spans, group=group)
    return MeasuredTimeline(stages)


def _wrapped(method: Any, what: str, entries: list[_Entry], clock: _Clock) -> Any:
    def run(engine: PipelineEngine, **kwargs: Any) -> None:
        start = clock.now()
        method(engine, **kwargs)
        # Stock DeepSpeed's instructions name a buffer instead of a micro-batch.
        micro_batch = kwargs.get("micro_batch", kwargs.get("buffer_id"))
        entries.append(_Entry(what, start, clock.now(), micro_batch, kwargs.get("slice")))

    return run
