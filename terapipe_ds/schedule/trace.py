"""Timelines, measured or simulated: what each stage did and when, as numbers, trace and picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files import temporary_for, write_text
from .simulator import Timeline

# A bar is numbered if there are at most this many on a stage; more would be illegible.
_NUMBERED = 80


_COMPUTE = ("F", "B", "W")


class Span(NamedTuple):
    """One thing that a stage did.

    Attributes:
        what: ``"F"``, ``"B"``, ``"W"``, or the instruction's name.
        start: seconds, on a clock that all stages share.
        stop: seconds.
        micro_batch: None where the span belongs to none.
        slice: None where the span belongs to none.
    """

    what: str
    start: float
    stop: float
    micro_batch: int | None = None
    slice: int | None = None

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def label(self) -> str:
        if self.micro_batch is None:
            return self.what
        where = f"{self.micro_batch}" if self.slice is None else f"{self.micro_batch}.{self.slice}"
        return f"{self.what}{where}"


@dataclass(frozen=True)
class MeasuredTimeline:
    """The spans of every stage in one iteration."""

    stages: list[list[Span]]

    @classmethod
    def simulated(cls, timeline: Timeline) -> MeasuredTimeline:
        """A simulated step, as if it had been measured."""
        return cls(
            [
                [
                    Span(action.kind, start_ms / 1e3, stop_ms / 1e3, *action[1:])
                    for _, action, start_ms, stop_ms in events
                ]
                for events in timeline.events
            ]
        )

    @property
    def window(self) -> tuple[float, float]:
        """From the first forward of any stage to the last backward of any stage, in seconds."""
        computed = [span for spans in self.stages for span in spans if span.what in _COMPUTE]
        return min(span.start for span in computed), max(span.stop for span in computed)

    def busy(self) -> list[float]:
        """Seconds that each stage computed."""
        return [
            sum(span.seconds for span in spans if span.what in _COMPUTE) for spans in self.stages
        ]

    def bubble(self) -> list[float]:
        """The share of the window in which each stage computed nothing."""
        start, stop = self.window
        return [1 - busy / (stop - start) for busy in self.busy()]

    def shares(self) -> list[dict[str, float]]:
        """How each stage spent the window: busy computing, waiting for a neighbour, or idle.

        Idle is all the rest: before its first and after its last instruction, and what sending and
        the engine itself took between them.
        """
        start, stop = self.window
        whole = stop - start
        shares = []
        for busy, spans in zip(self.busy(), self.stages, strict=True):
            waiting = sum(
                max(0.0, min(span.stop, stop) - max(span.start, start))
                for span in spans
                if span.what.startswith("Recv")
            )
            idle = whole - busy - waiting
            shares.append({"busy": busy / whole, "waiting": waiting / whole, "idle": idle / whole})
        return shares


def write_chrome_trace(path: Path, timelines: Mapping[str, MeasuredTimeline]) -> None:
    """Writes timelines for ``ui.perfetto.dev`` or ``chrome://tracing``, a process a timeline.

    Args:
        path: the JSON file; written to a temporary file first, then renamed.
        timelines: by name; each starts at 0.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        origin, _ = timeline.window
        events.append(_named("process_name", process, 0, name))
        for stage, spans in enumerate(timeline.stages):
            events.append(_named("thread_name", process, stage, f"stage {stage}"))
            events += [
                {
                    "name": span.label,
                    "cat": span.what,
                    "ph": "X",
                    "pid": process,
                    "tid": stage,
                    "ts": (span.start - origin) * 1e6,
                    "dur": span.seconds * 1e6,
                }
                for span in spans
            ]
    write_text(path, json.dumps({"traceEvents": events}))


def write_picture(path: Path, timelines: Mapping[str, MeasuredTimeline]) -> None:
    """Draws timelines below each other, all at one scale.

    Args:
        path: the picture, its format by its suffix (PNG, SVG, ...).
        timelines: by title.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    longest = max(stop - start for start, stop in (t.window for t in timelines.values()))
    heights = [1.2 + 0.3 * len(timeline.stages) for timeline in timelines.values()]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    rows = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
        draw(axes, timeline, title=title, until_s=longest)
    with temporary_for(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix[1:] or "png")


def draw(
    axes: Any, timeline: MeasuredTimeline, *, title: str, until_s: float | None = None
) -> None:
    """Draws a timeline, a row a stage, numbered by slice where there is room.

    Args:
        axes: matplotlib axes.
        timeline: the timeline.
        title: of the picture.
        until_s: where the time axis ends, to draw several timelines at one scale.
    """
    origin, end = timeline.window
    colors = {"F": "#4c78a8", "B": "#f2a33a", "W": "#72b7b2"}
    for stage, spans in enumerate(timeline.stages):
        numbered = sum(span.what in colors for span in spans) <= _NUMBERED
        for span in spans:
            if span.what not in colors:
                continue
            axes.barh(
                stage,
                span.seconds,
                left=span.start - origin,
                height=0.8,
                color=colors[span.what],
                edgecolor="white",
                linewidth=0.6,
            )
            if span.slice is not None and numbered:
                middle = span.start - origin + span.seconds / 2
                axes.text(middle, stage, str(span.slice), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(timeline.stages)), _stage_names(timeline.stages))
    axes.invert_yaxis()
    axes.set_xlim(0, until_s if until_s is not None else end - origin)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)


def _stage_names(stages: Sequence[Any]) -> list[str]:
    return [f"stage {stage}" for stage in range(len(stages))]


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
