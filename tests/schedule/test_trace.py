"""Timelines: busy time and bubble, the Perfetto file, the picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from terapipe_ds.schedule import Action, simulate, simulate_order
from terapipe_ds.schedule.trace import (
    MeasuredTimeline,
    Span,
    draw,
    write_chrome_trace,
    write_picture,
)

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


def test_shares_of_the_window() -> None:
    """A wait that began before the window counts from the window's start."""
    first, second = TIMELINE.shares()
    assert first == pytest.approx({"busy": 1 / 2, "waiting": 1 / 2, "idle": 0})
    assert second == pytest.approx({"busy": 1 / 2, "waiting": 1 / 6, "idle": 1 / 3})


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


def test_weight_gradients_are_computation() -> None:
    spans = [Span("F", 0, 1, 0, 0), Span("B", 3, 4, 0, 0), Span("W", 5, 8, 0, 0)]
    timeline = MeasuredTimeline([spans])
    assert timeline.window == (0, 8)
    assert timeline.busy() == [5]
    assert timeline.bubble() == [pytest.approx(3 / 8)]


def test_a_simulated_step_reads_as_a_measured_one() -> None:
    """One micro-batch of two slices on two stages, 1 ms forward and 2 ms backward."""
    simulated = simulate("1f1b", [[(1, 2), (1, 2)]], stages=2)
    timeline = MeasuredTimeline.simulated(simulated)
    first = [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.1", 5, 7), ("B0.0", 7, 9)]
    second = [("F0.0", 1, 2), ("F0.1", 2, 3), ("B0.1", 3, 5), ("B0.0", 5, 7)]
    for spans, expected in zip(timeline.stages, (first, second), strict=True):
        assert [(span.label, span.start, span.stop) for span in spans] == [
            (label, pytest.approx(start / 1e3), pytest.approx(stop / 1e3))
            for label, start, stop in expected
        ]
    assert timeline.busy() == pytest.approx([busy / 1e3 for busy in simulated.busy_ms])
    assert timeline.bubble() == pytest.approx(simulated.bubble)


def test_a_simulated_split_backward() -> None:
    """W has spans of its own, which count as busy."""
    order = [[Action("F", 3, 1), Action("B", 3, 1), Action("W", 3, 1)]]
    simulated = simulate_order(order, lambda stage, kind, d, s: {"F": 1, "B": 2, "W": 4}[kind])
    timeline = MeasuredTimeline.simulated(simulated)
    assert [span.label for span in timeline.stages[0]] == ["F3.1", "B3.1", "W3.1"]
    assert timeline.stages[0][2] == Span("W", pytest.approx(0.003), pytest.approx(0.007), 3, 1)
    assert timeline.busy() == [pytest.approx(0.007)]
    assert timeline.bubble() == [pytest.approx(0.0)]


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG\r\n"), ("a.svg", b"<?xml"), ("a picture", b"\x89PNG\r\n")],
)
def test_write_picture(tmp_path: Path, name: str, start: bytes) -> None:
    """The format is the suffix's, PNG without one."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / name
    write_picture(path, {"the first title": TIMELINE, "the second one": TIMELINE})
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


def test_a_picture_has_its_titles_and_one_scale(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    longer = MeasuredTimeline([[Span("F", 0, 1, 0, 0), Span("W", 19, 20, 0, 0)]])
    path = tmp_path / "a.svg"
    write_picture(path, {"the first title": TIMELINE, "the second one": longer})
    # matplotlib draws letters as shapes, and names them in comments.
    comments = re.findall(r"<!-- (.*?) -->", path.read_text())
    assert {"the first title", "the second one"} <= set(comments)
    assert comments.count("stage 0") == 2 and comments.count("stage 1") == 1
    # Both axes go to 20 s, so both have this label.
    assert comments.count("20.0") == 2


def test_a_picture_that_fails_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="not supported"):
        write_picture(tmp_path / "a.xyz", {"title": TIMELINE})
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_many_bars_have_no_numbers() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    spans = [Span("F", second, second + 1, 0, second) for second in range(81)]
    for count, numbers in ((80, 80), (81, 0)):
        axes = Figure().subplots()
        draw(axes, MeasuredTimeline([spans[:count]]), title="many")
        assert len(axes.patches) == count
        assert len(axes.texts) == numbers
        assert axes.get_xlim() == (0, count)


def test_w_is_drawn_in_a_color_of_its_own() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    spans = [Span(kind, at, at + 1, 0, 0) for at, kind in enumerate("FBW")]
    axes = Figure().subplots()
    draw(axes, MeasuredTimeline([spans]), title="three")
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3
