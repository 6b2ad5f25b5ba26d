"""Timelines: busy time and bubble, the Perfetto file, the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from terapipe_ds.schedule.trace import MeasuredTimeline, Span, draw, write_chrome_trace

# Two stages, one micro-batch: the second computes while the first waits, and the other way round.
TIMELINE = MeasuredTimeline(
    [
        [Span("F", 10, 11, 0, 0), Span("RecvGrad", 11, 14, 0, 0), Span("B", 14, 16, 0, 0)],
        [Span("RecvActivation", 9, 11, 0, 0), Span("F", 11, 12, 0, 0), Span("B", 12, 14, 0, 0)],
    ]
)


def test_busy_and_bubble_count_computation_alone() -> None:
    assert TIMELINE.window == (10, 16)
    assert TIMELINE.busy() == [3, 3]
    assert TIMELINE.bubble() == [pytest.approx(0.5)] * 2


@pytest.mark.parametrize(
    ("span", "label"),
    [
        (Span("F", 0, 1, 2, 3), "F2.3"),
        (Span("B", 0, 1, 2), "B2"),
        (Span("OptimizerStep", 0, 1), "OptimizerStep"),
    ],
)
def test_labels(span: Span, label: str) -> None:
    assert span.label == label


def test_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(path, {"one": TIMELINE, "two": TIMELINE})
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 12
    first = next(e for e in spans if e["pid"] == 1 and e["tid"] == 0)
    assert (first["name"], first["ts"], first["dur"]) == ("F0.0", 0, 1e6)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"one", "two", "stage 0", "stage 1"}
    assert list(tmp_path.iterdir()) == [path]


def test_picture_has_a_bar_for_each_computation() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    draw(axes, TIMELINE, title="a title", until_s=8)
    assert len(axes.patches) == 4
    assert sorted(text.get_text() for text in axes.texts) == ["0"] * 4
    assert axes.get_xlim() == (0, 8)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    pyplot.close(figure)
