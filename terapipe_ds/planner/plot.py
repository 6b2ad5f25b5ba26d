"""The paper's Figure 3 for measured stages, and predicted against measured times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..files import temporary_for
from .cost import CostModel


def plot_costs(cost: CostModel, path: Path) -> None:
    """Draws time and tokens per ms against length without context, and how well the fit predicts.

    Args:
        cost: with the samples that it was fitted to.
        path: the picture, its format by its suffix.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    times, rates, fits = figure.subplots(1, 3)
    for index, stage in enumerate(cost.stages):
        color = f"C{index}"
        base = sorted(
            (s.length, s.forward_ms + s.backward_ms)
            for s in stage.samples
            if s.context == 0 and s.sequences == 1
        )
        if base:
            length, ms = np.array(base).T
            times.plot(length, ms, "o", color=color, markersize=3)
            rates.plot(length, length / ms, "o", color=color, markersize=3)
        line = np.geomspace(min(8, cost.seq_length), cost.seq_length, 200)
        predicted = stage.time(line, 0)
        times.plot(line, predicted, color=color, linewidth=1, label=stage.name)
        rates.plot(line, line / predicted, color=color, linewidth=1, label=stage.name)
        measured = np.array([s.forward_ms + s.backward_ms for s in stage.samples])
        modelled = np.array([stage.time(s.length, s.context, s.sequences) for s in stage.samples])
        held_out = np.array([s.held_out for s in stage.samples], dtype=bool)
        seen = ~held_out
        fits.loglog(measured[seen], modelled[seen], ".", color=color, markersize=3, alpha=0.5)
        label = f"{stage.name}, held out"
        fits.loglog(measured[held_out], modelled[held_out], "x", color=color, label=label)
    times.set(xlabel="slice length (tokens)", ylabel="forward and backward (ms)")
    times.set_title("time without context", fontsize=10)
    rates.set(xlabel="slice length (tokens)", ylabel="tokens per ms")
    rates.set_title("throughput without context", fontsize=10)
    low, high = fits.get_xlim()
    fits.plot([low, high], [low, high], "k-", linewidth=0.5)
    fits.set(xlabel="measured (ms)", ylabel="predicted (ms)")
    fits.set_title("all lengths and contexts", fontsize=10)
    for axes in (times, rates, fits):
        axes.legend(fontsize=8)
    with temporary_for(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix[1:] or "png")


__all__ = ["plot_costs"]
