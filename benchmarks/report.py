"""Writes docs/benchmarks.md and its pictures from the JSON files of the benchmarks.

    python benchmarks/report.py [--results FOLDER] [--out FILE]

Reads ``paper.json``, ``peers.json``, ``scaling.json`` and ``emulate.json``, each written by the
benchmark of that name with ``--json``. A file that is missing leaves its section out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import peers
import scaling

from terapipe_ds.files import temporary_for, write_text

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("command", "machine", "versions", "date", "results")

Lines = list[str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results"
    parser.add_argument("--results", type=Path, default=default, help="where the JSON files are")
    default = ROOT / "docs" / "benchmarks.md"
    parser.add_argument("--out", type=Path, default=default, help="pictures go beside it")
    args = parser.parse_args(argv)
    try:
        lines = report(args.results, args.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    write_text(args.out, "\n".join(lines) + "\n")
    return 0


def report(results: Path, out: Path) -> Lines:
    """The whole text; draws the pictures.

    Args:
        results: the folder of JSON files.
        out: the text's path; pictures are named after it.

    Raises:
        ValueError: one line, for a folder without results or a file that is none.
    """
    found = {name: _read(results / f"{name}.json") for name in SECTIONS}
    given = {name: content for name, content in found.items() if content is not None}
    if not given:
        names = ", ".join(f"{name}.json" for name in SECTIONS)
        raise ValueError(f"results: found none in {results}, allowed is at least one of {names}")
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/report.py` from `benchmarks/results/`; what each program",
        "does is in [benchmarks/](../benchmarks/README.md).",
    ]
    for name, content in given.items():
        title, write, draw = SECTIONS[name]
        picture = out.with_name(f"{out.stem}-{name}.png")
        lines += ["", f"## {title}", "", *_measured_on(content), ""]
        lines += write(content["results"])
        if draw is not None and _drawn(draw, content["results"], picture):
            lines += ["", f"![{title}]({picture.name})"]
    return lines


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name}: found no JSON ({error}), write it again") from None
    missing = [key for key in KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(
            f"{path.name}: found no {', '.join(missing)}, allowed is what the benchmark's --json "
            "writes; write it again"
        )
    return content


def _measured_on(content: dict[str, Any]) -> Lines:
    machine, versions = content["machine"], content["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        f"`{content['command']}`, {content['date']}, on {machine['cores']} cores "
        f"({machine['cpu']}) with {machine['memory_gib']:g} GiB; {used}."
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """A Markdown table."""
    lines = [_row(head), _row(["---"] * len(head))]
    return lines + [_row(row) for row in rows]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# The paper


def paper(results: dict[str, Any]) -> Lines:
    """Measured there against predicted, and what this planner makes of each setting."""
    held_out, found = results["held_out"], results["parameters"]
    lines = [
        "One model for all settings: arithmetic at "
        f"{found['flops'] / 1e12:.0f} TFLOP/s (the fit reaches its limit, the peak of a V100's "
        f"tensor cores), {found['layer_s'] * 1e3:.2f} ms for every layer and slice, "
        f"{found['tensor'] / 1e9:.1f} GB/s between tensor-parallel ranks, "
        f"{found['stage'] / 1e9:.1f} GB/s from stage to stage, {found['replica'] / 1e9:.2f} GB/s "
        f"a GPU between replicas; and memory at {found['memory'] / 1e9:.0f} GB/s, which is not "
        "fitted. What is done with them (bytes for each weight, score and activation) was counted "
        "in the authors' published code, see `benchmarks/v100_cluster.py`. A latency of messages "
        "cannot be told from the time of a layer by these rows: fitted, it is 0, so there is none.",
        "",
        "Fitted are the rows without TeraPipe and setting 8's uniform slices; nothing else. The "
        "largest errors are in settings 6 and 7, whose replicas sum most gradients over the "
        "network: what the model says of that, from settings 1, 2 and 4 too, is too much for them. "
        "Setting 6's slices are not listed one by one: 33 of 64 and 48 tokens.",
        "",
        f"Of the {held_out['rows']} rows that were not fitted, the model is off by "
        f"{held_out['median_error']:.1%} (median) and {held_out['worst_error']:.1%} (worst).",
        "",
    ]
    lines += table(
        ("row", "", "paper, s", "model, s", "error"),
        (
            (
                row["row"],
                "fitted" if row["fitted"] else "predicted",
                f"{row['paper_s']:.3f}",
                f"{row['predicted_s']:.3f}",
                f"{row['error']:+.1%}",
            )
            for row in results["rows"]
        ),
    )
    lines += [
        "",
        "In the same model, seconds of an iteration without slices, with the paper's scheme,",
        "with this planner's, and with that scheme under this project's schedules, simulated; GiB",
        "of the stage that needs most.",
        "",
    ]
    head = ("setting", "without", "paper", "ours", "1f1b", "zb-h1")
    lines += table(
        (*head, "GiB: paper", "1f1b", "zb-h1"),
        (
            (
                str(found["setting"]),
                *(
                    f"{found[name]:.3f}"
                    for name in ("without_s", "paper_s", "ours_s", "one_f_one_b_s", "zero_bubble_s")
                ),
                *(
                    f"{found[name]:.1f}"
                    for name in ("paper_gib", "one_f_one_b_gib", "zero_bubble_gib")
                ),
            )
            for found in results["planned"]
        ),
    )
    return lines


def draw_paper(results: dict[str, Any], figure: Any) -> None:
    """Predicted against measured, with a quarter more and less."""
    axes = figure.subplots()
    for fitted, label, marker in ((True, "fitted", "o"), (False, "predicted", "^")):
        rows = [row for row in results["rows"] if row["fitted"] == fitted]
        axes.plot(
            [row["paper_s"] for row in rows],
            [row["predicted_s"] for row in rows],
            marker,
            label=label,
        )
    seconds = [row["paper_s"] for row in results["rows"]]
    ends = (min(seconds) / 1.5, max(seconds) * 1.5)
    axes.loglog(ends, ends, color="grey", linewidth=1)
    low, high = ([share * end for end in ends] for share in (0.75, 1.25))
    axes.fill_between(ends, low, high, color="grey", alpha=0.15, label="25%")
    axes.set(xlabel="paper, s", ylabel="model, s")
    axes.legend()


# Peers


def against_peers(results: dict[str, Any]) -> Lines:
    """A table for each number of stages and sequence length, where peers win, targets."""
    rows = results["rows"]
    settings = peers.by_setting(rows)
    lines = [
        "Milliseconds of a step, optimizer included: median, quartiles, and the ratio to the",
        "fastest. On 2 stages a GPT trains on one core a rank, as wide as the time for all of this",
        "allows; more stages are emulated by layers that sleep.",
    ]
    for stages, seq_length in dict.fromkeys(key[:2] for key in settings):
        counts = [key[2] for key in settings if key[:2] == (stages, seq_length)]
        found = {count: settings[stages, seq_length, count] for count in counts}
        hidden = next(iter(found.values()))[0].get("hidden")
        width = "" if hidden is None else f", width {hidden}"
        lines += ["", f"### {stages} stages, {seq_length} tokens{width}", ""]
        names = dict.fromkeys(row["name"] for rows in found.values() for row in rows)
        lines += table(
            ("", *(f"{count} micro-batch{'es' * (count > 1)}" for count in counts)),
            ([name, *(_cell(found[count], name) for count in counts)] for name in names),
        )
        sliced = [
            f"{row['name']} with {count}: {_short(row['slices'])}{peers.slack(row)}"
            for count, rows in found.items()
            for row in rows
            if row["is_ours"]
        ]
        lines += ["", f"Slices: {'; '.join(sliced)}."]
    lines += ["", "### Where a peer wins", ""]
    lines += [f"- {line}" for line in peers.peer_wins(rows)] or ["Nowhere."]
    lines += ["", "### Targets", ""]
    lines += [
        f"- {name}: {'met' if met else 'missed'}" for name, met in peers.targets(rows).items()
    ]
    return lines


def _cell(rows: Sequence[dict[str, Any]], name: str) -> str:
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        return "does not run"
    median, (low, high) = peers.median(row), peers.quartiles(row)
    ratio = median / min(map(peers.median, rows))
    written = f"{median * 1e3:.0f} ({low * 1e3:.0f} - {high * 1e3:.0f}), {ratio:.2f}x"
    return f"**{written}**" if ratio == 1 else written


def _short(slices: str) -> str:
    """Lengths in few words."""
    lengths = [part.strip() for part in slices.strip("[]()").split(",") if part.strip()]
    if len(set(lengths)) == 1 and len(lengths) > 1:
        return f"{len(lengths)} of {lengths[0]}"
    return f"{len(lengths)} ({', '.join(lengths)})" if len(lengths) > 1 else "none"


def draw_peers(results: dict[str, Any], figure: Any) -> None:
    """How many times faster than stock DeepSpeed, against micro-batches."""
    settings = peers.by_setting(results["rows"])
    columns = list(dict.fromkeys(key[:2] for key in settings))
    figure.set_size_inches(3.2 * len(columns), 4)
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for ax, (stages, seq_length) in zip(axes, columns, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for key, rows in settings.items():
            if key[:2] != (stages, seq_length):
                continue
            stock = peers.median(rows[0])
            for row in rows:
                lines.setdefault(row["name"], []).append((key[2], stock / peers.median(row)))
        for name, points in lines.items():
            style = "o-" if "terapipe" in name else ".--"
            ax.plot(*zip(*points, strict=True), style, label=name)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="micro-batches", title=f"{stages} stages, {seq_length} tokens")
    axes[0].set_ylabel("times as fast as DeepSpeed")
    axes[0].legend(fontsize=7)


# Scaling


def scaled(results: dict[str, Any]) -> Lines:
    """Exponents, flags, and the numbers."""
    growths = results["growth"]
    lines = [
        "A number that grows with an exponent of 1 doubles where the size doubles. Memory of a",
        "stage is counted: `activation_bytes` by hooks on the tensors that autograd keeps,",
        "`kv_bytes` and `kv_grad_bytes` from the buffers of keys and values and their gradients;",
        "`rank_gib` is a process's pages. `engine_us` is the engine's own CPU time for a slice,",
        "`over_simulated` a step's time over the simulated one.",
        "",
    ]
    lines += table(
        ("grows with", "what", "exponent", "last doubling", "at most", ""),
        (
            (
                growth["series"],
                f"`{growth['measure']}`",
                f"{growth['exponent']:.2f}",
                f"{growth['last']:.2f}",
                "" if growth["allowed"] is None else f"{growth['allowed']:.2f}: {growth['why']}",
                "**too fast**" if growth["flagged"] else "",
            )
            for growth in growths
        ),
    )
    for name, points in results["series"].items():
        measures = [measure for measure in points[0] if measure not in ("x", "seconds")]
        lines += ["", f"### {name.capitalize()}", ""]
        lines += table(
            (scaling.X[name], *(f"`{measure}`" for measure in measures)),
            (
                (
                    str(point["x"]),
                    *(scaling.written(name, scaling.largest(point[name])) for name in measures),
                )
                for point in points
            ),
        )
    return lines


def draw_scaling(results: dict[str, Any], figure: Any) -> None:
    """Every number over its first, both axes in powers of two."""
    series = results["series"]
    figure.set_size_inches(3.6 * len(series), 4)
    axes = figure.subplots(1, len(series), squeeze=False)[0]
    for ax, (name, points) in zip(axes, series.items(), strict=True):
        for measure in points[0]:
            if measure in ("x", "seconds"):
                continue
            xs, ys = scaling.values(points, measure)
            if ys:
                ax.plot(xs, [y / ys[0] for y in ys], "o-", markersize=3, label=measure)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set(xlabel=scaling.X[name], title=name)
        ax.legend(fontsize=7)
    axes[0].set_ylabel("over the first")


# Emulated stages


def emulated(results: dict[str, Any]) -> Lines:
    """Measured and simulated makespans."""
    lines = [
        "Layers that sleep under the real engine, launcher and messages "
        "([schedules.md](schedules.md)); the engine's own time for a slice is "
        f"{results['engine_us']:.0f} us.",
        "",
    ]
    head = ("stages", "schedule", "slices", "measured ms", "simulated ms", "over")
    lines += table(
        (*head, "speedup over stock", "simulated"),
        (
            (
                str(row["stages"]),
                row["schedule"],
                _slices(row["slices"]),
                f"{row['measured_ms']:.0f}",
                f"{row['simulated_ms']:.0f}",
                f"{row['measured_ms'] / row['simulated_ms'] - 1:+.1%}",
                f"{row['speedup']:.2f}x",
                f"{row['simulated_speedup']:.2f}x",
            )
            for row in results["rows"]
        ),
    )
    return lines


def _slices(slices: int | list[int]) -> str:
    return f"{slices} even" if isinstance(slices, int) else f"planned, {len(slices)}"


def _drawn(draw: Callable[[Any, Any], None], results: Any, path: Path) -> bool:
    """Whether there is a picture now: without matplotlib there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name} is left out: matplotlib is not installed")
        return False
    figure = Figure(figsize=(6, 5), layout="constrained")
    draw(results, figure)
    with temporary_for(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    return True


SECTIONS: dict[str, tuple[str, Callable[[Any], Lines], Callable[[Any, Any], None] | None]] = {
    "paper": ("The paper's tables in one model of its cluster", paper, draw_paper),
    "peers": ("Against other pipeline engines", against_peers, draw_peers),
    "scaling": ("How cost grows", scaled, draw_scaling),
    "emulate": ("Emulated stages", emulated, None),
}


if __name__ == "__main__":
    sys.exit(main())
