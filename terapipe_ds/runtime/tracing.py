"""``"trace": "dir"``: the timeline of chosen steps, all stages in one file and one picture."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed
from deepspeed.utils.logging import print_dist

from ..errors import ConfigError
from ..files import write_text
from ..planner.prediction import predict
from ..schedule.order import Kind, actions
from ..schedule.simulator import Timeline, simulate_order
from ..schedule.trace import MeasuredTimeline, write_chrome_trace, write_picture
from .header import BatchShape
from .recorder import gather, recorded
from .watchdog import Wait

if TYPE_CHECKING:
    from .engine import TokenSliceEngine


def check_folder(folder: str) -> None:
    """Makes the folder on the rank that writes.

    Raises:
        ConfigError: if it cannot be made or written to.
    """
    if torch.distributed.get_rank() != 0:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
        reason = "no permission"
    except OSError as error:
        writable, reason = False, error.strerror or str(error)
    if not writable:
        raise ConfigError(
            f"terapipe.trace: found {folder!r}, which cannot be written to ({reason}), allowed is "
            "a folder; change terapipe.trace"
        )


class Tracer:
    """Traces a training step where the block asks for it.

    Args:
        engine: the engine.
        folder: where rank 0 writes ``stepN.json`` (for ui.perfetto.dev), ``stepN.png`` and
            ``stepN-shares.json``, planned beside measured.
        steps: global steps to trace, from 0.
    """

    def __init__(self, engine: TokenSliceEngine, folder: str, steps: list[int]) -> None:
        self._engine, self._folder, self._steps = engine, Path(folder), set(steps)
        self._shapes: set[BatchShape] = set()
        self._slices: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one ``train_batch``; records it if it is one of the steps."""
        engine = self._engine
        step = engine.global_steps
        if step not in self._steps:
            yield
            return
        # Clocks of several machines differ; all ranks leave a barrier at about the same time.
        with engine._watchdog.waiting(Wait("the start of the trace", "all ranks")):
            torch.distributed.barrier()
        origin = time.time()
        with recorded(engine) as spans:
            yield
        shifted = [
            span._replace(start=span.start - origin, stop=span.stop - origin) for span in spans
        ]
        with engine._watchdog.waiting(Wait("the trace", "all stages of this pipeline")):
            measured = gather(engine, shifted)
        if engine.global_rank != 0:
            return
        try:
            self._write(step, measured)
        except OSError as error:
            print_dist(f"terapipe: the trace of step {step} is lost ({error})", ranks=[0])

    def saw(self, shapes: list[BatchShape], slices: list[int]) -> None:
        """Takes the micro-batches, and the groups' numbers of slices, of the step that begins."""
        self._shapes, self._slices = set(shapes), slices

    def _write(self, step: int, measured: MeasuredTimeline) -> None:
        planned = self._planned(measured)
        names = {f"measured, step {step}": measured, "planned": MeasuredTimeline.simulated(planned)}
        write_chrome_trace(self._folder / f"step{step}.json", names)
        shares = {
            "measured": measured.shares(),
            "planned": names["planned"].shares(),
        }
        write_text(self._folder / f"step{step}-shares.json", json.dumps(shares, indent=1) + "\n")
        start, stop = measured.window
        titles = {
            f"measured, step {step}: {(stop - start) * 1e3:.1f} ms, "
            f"busy {_mean(measured, 'busy'):.0%}": measured,
            f"planned: {planned.makespan_ms:.1f} ms": names["planned"],
        }
        picture = ""
        try:
            write_picture(self._folder / f"step{step}.png", titles)
        except ImportError:
            picture = ", no picture without matplotlib"
        print_dist(f"terapipe: trace of step {step} in {self._folder}{picture}", ranks=[0])

    def _planned(self, measured: MeasuredTimeline) -> Timeline:
        """The plan's own times where there is one; otherwise the measured work without waiting."""
        engine = self._engine
        shape = next(iter(self._shapes))
        plan, cost = engine.plans.get(shape), engine.costs.get(shape[0])
        if len(self._shapes) == 1 and plan is not None and cost is not None:
            return predict(
                cost,
                plan.scheme,
                stages=engine.num_stages,
                schedule=engine.terapipe.schedule,
                micro_batches=engine.micro_batches,
                warmup=engine._warmup([shape]),
            )
        took = {
            (stage, span.what, span.micro_batch, span.slice): span.seconds * 1e3
            for stage, spans in enumerate(measured.stages)
            for span in spans
        }

        def duration(stage: int, kind: Kind, micro_batch: int, index: int) -> float:
            return took[stage, kind, micro_batch, index]

        order = actions(
            engine.terapipe.schedule,
            engine.num_stages,
            len(self._slices),
            self._slices,
            warmup=engine._warmup(self._shapes),
        )
        return simulate_order(order, duration)


def _mean(timeline: MeasuredTimeline, share: str) -> float:
    shares = timeline.shares()
    return sum(stage[share] for stage in shares) / len(shares)


__all__ = ["Tracer"]
