"""Records when a pipeline engine, stock or sliced, ran its instructions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def recorded(engine: PipelineEngine) -> Iterator[list[Span]]:
    """Records every instruction that the engine runs inside.

    Args:
        engine: any ``PipelineEngine``. Its instruction map is wrapped and put back.

    Yields:
        The spans of this rank, filled as instructions end. Times are those of the machine's clock,
        so that ranks of one machine agree.
    """
    spans: list[Span] = []
    original = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {
        kind: _wrapped(method, _COMPUTE.get(kind, kind.__name__), spans)
        for kind, method in original.items()
    }
    try:
        yield spans
    finally:
        del engine._INSTRUCTION_MAP


def gather(engine: PipelineEngine, spans: list[Span]) -> MeasuredTimeline:
    """Brings the spans of a pipeline's stages together, on every rank of it."""
    stages: list[Any] = [None] * engine.num_stages
    group = engine.grid.get_pipe_parallel_group()
    torch.distributed.all_gather_object(stages, spans, group=group)
    return MeasuredTimeline(stages)


def _wrapped(method: Any, what: str, spans: list[Span]) -> Any:
    def run(engine: PipelineEngine, **kwargs: Any) -> None:
        start = time.time()
        method(engine, **kwargs)
        # Stock DeepSpeed's instructions name a buffer instead of a micro-batch.
        micro_batch = kwargs.get("micro_batch", kwargs.get("buffer_id"))
        spans.append(Span(what, start, time.time(), micro_batch, kwargs.get("slice")))

    return run
