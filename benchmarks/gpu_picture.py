"""Part 5 of ``gpu_profile.py``: the picture of what was measured, where matplotlib is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpu_common import Row
from gpu_layer import without_context


def draw(profiles: list[Row], out: Path, device: str) -> str | None:
    """The paper's figure 3 for this device, and what the fits say against what was measured.

    Returns:
        The file's name; None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{device}: one layer, forward and backward, one sequence")
    (times, speeds), below = figure.subplots(2, 2)
    for found, color, predicted in zip(profiles, ("#4c78a8", "#f2a33a"), below, strict=False):
        _draw_layer(times, speeds, found, color)
        _draw_predicted(predicted, found, color)
    for axes, title, unit in (
        (times, "Time of a slice without context", "ms"),
        (speeds, "Throughput", "tokens / ms"),
    ):
        axes.set(title=title, xlabel="tokens of the slice", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.legend()
    path = out / "picture.png"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, dpi=130, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.name


def print_picture(found: str | None) -> None:
    print(f"\npicture: {found or 'left out, matplotlib is not installed'}")


def _draw_layer(times: Any, speeds: Any, found: Row, color: str) -> None:
    points = without_context(found)
    lengths = [point["length"] for point in points]
    label = found["about"]["name"]
    times.plot(lengths, [point["ms"] for point in points], "o-", color=color, label=label)
    tokens_per_ms = [point["length"] / point["ms"] for point in points]
    speeds.plot(lengths, tokens_per_ms, "o-", color=color, label=label)


def _draw_predicted(axes: Any, found: Row, color: str) -> None:
    for held_out, marker, label in ((False, ".", "fitted"), (True, "x", "held out")):
        points = [point for point in found["points"] if point["held_out"] == held_out]
        measured = [point["ms"] for point in points]
        axes.loglog(
            measured,
            [point["predicted_ms"] for point in points],
            marker,
            color="#d1495b" if held_out else color,
            label=label,
        )
    every = [point["ms"] for point in found["points"]]
    ends = [min(every), max(every)]
    axes.loglog(ends, ends, "-", color="gray", linewidth=0.8)
    name, form = found["about"]["name"], found["form"]
    axes.set(title=f"{name}: fit '{form}'", xlabel="measured ms", ylabel="predicted ms")
    axes.legend()
