"""Trains one GPT twice, side by side: under stock DeepSpeed's schedule and in token slices.

    deepspeed --num_gpus 2 examples/pretrain_gpt.py --deepspeed_config configs/quickstart.json

Both runs start from the same weights and see the same text. The two take turns, step by step, so
that the machine treats them alike. At the end a table compares them, and the loss curves and both
measured timelines are written as one picture and one Perfetto trace.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text_data import VOCAB_SIZE, batches, datasets, write_indexed_dataset

import terapipe_ds
from terapipe_ds.models.gpt import gpt_pipeline
from terapipe_ds.runtime.recorder import gather, recorded
from terapipe_ds.schedule.trace import MeasuredTimeline, draw, write_chrome_trace

TAIL = 8
"""Steps that a reported loss is the mean of: one sequence a step is a noisy sample."""


@dataclass
class Run:
    """One of the two runs."""

    name: str
    engine: Any
    data: Iterator[Any]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timeline: MeasuredTimeline | None = None
    validation_loss: float = math.nan

    def step(self, *, record: bool) -> None:
        """One ``train_batch``, timed; ``record`` keeps the timeline."""
        torch.distributed.barrier()
        start = time.perf_counter()
        if record:
            with recorded(self.engine) as spans:
                loss = self.engine.train_batch(self.data)
            self.timeline = gather(self.engine, spans)
        else:
            loss = self.engine.train_batch(self.data)
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main() -> None:
    args = _arguments()
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    ds_config = json.loads(Path(args.deepspeed_config).read_text())

    prefix = args.out / "data" / "text"
    if rank == 0:
        write_indexed_dataset(prefix)
    torch.distributed.barrier()

    runs = [
        _start("stock DeepSpeed", {**ds_config, "terapipe": {"enabled": False}}, args, prefix),
        _start("token slices", ds_config, args, prefix),
    ]
    _train(runs, args.steps, show=rank == 0)
    for run in runs:
        run.validation_loss = _validate(run, args, prefix)
    if rank == 0:
        _report(runs, args.out, ds_config)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=32, help="training steps of each run")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"))
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config: found none, allowed is the path of a DeepSpeed JSON")
    if args.steps < 2:
        parser.error(f"--steps: found {args.steps}, allowed is at least 2")
    return args


def _start(name: str, ds_config: dict[str, Any], args: argparse.Namespace, prefix: Path) -> Run:
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    model = gpt_pipeline(
        config,
        vocab_size=VOCAB_SIZE,
        seq_length=args.seq_length,
        num_stages=torch.distributed.get_world_size(),
        position_embedding_type="rope",
        seed=args.seed,
    )
    engine, _, _, _ = terapipe_ds.initialize(
        model=model, config=ds_config, model_parameters=list(model.parameters())
    )
    return Run(name, engine, _batches(engine, args, prefix, training=True))


def _batches(
    engine: Any, args: argparse.Namespace, prefix: Path, *, training: bool
) -> Iterator[Any]:
    samples = args.steps * engine.train_batch_size()
    sets = datasets(prefix, seq_length=args.seq_length, samples=samples, seed=args.seed)
    return batches(sets[0 if training else 1], sequences=engine.train_micro_batch_size_per_gpu())


def _train(runs: list[Run], steps: int, *, show: bool) -> None:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 100)
    with Progress(*columns, console=console, disable=not show) as progress:
        task = progress.add_task("starting", total=steps)
        for step in range(steps):
            for run in runs:
                run.step(record=step == steps - 1)
            losses = ", ".join(f"{run.name} {run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, description=f"loss: {losses}")
            if show and not console.is_terminal and (step + 1) % 5 == 0:
                print(f"step {step + 1}/{steps}  loss: {losses}", file=sys.stderr, flush=True)


def _validate(run: Run, args: argparse.Namespace, prefix: Path) -> float:
    data = _batches(run.engine, args, prefix, training=False)
    return run.engine.eval_batch(data, num_micro_batches=8).item()


def _report(runs: list[Run], out: Path, ds_config: dict[str, Any]) -> None:
    stock, sliced = runs
    # The first step compiles and allocates; it says nothing of the schedule.
    medians = [statistics.median(run.seconds[1:]) for run in runs]
    bubbles = [statistics.mean(run.timeline.bubble()) for run in runs]
    gap = max(abs(a - b) for a, b in zip(stock.losses, sliced.losses, strict=True))

    table = Table(title=f"slices: {ds_config['terapipe']['slices']}")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_row("loss, first step", *(f"{run.losses[0]:.4f}" for run in runs))
    table.add_row(f"loss, mean of last {TAIL}", *(f"{_mean_of_last(run):.4f}" for run in runs))
    table.add_row("validation loss", *(f"{run.validation_loss:.4f}" for run in runs))
    table.add_row("largest loss difference", "", f"{gap:.1e}")
    table.add_row("seconds per step (median)", *(f"{median:.3f}" for median in medians))
    table.add_row("speedup", "", f"{medians[0] / medians[1]:.2f}x")
    table.add_row("bubble (mean of stages)", *(f"{bubble:.0%}" for bubble in bubbles))
    Console(width=90).print(table)

    timelines = {run.name: run.timeline for run in runs}
    trace, picture = out / "timeline.json", out / "quickstart.png"
    write_chrome_trace(trace, timelines)
    _draw(runs, picture)
    print(f"picture: {picture}\ntrace (open in ui.perfetto.dev): {trace}", flush=True)


def _mean_of_last(run: Run) -> float:
    return statistics.mean(run.losses[-TAIL:])


def _draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, *rows) = pyplot.subplots(
        3, 1, figsize=(10, 8), height_ratios=[2, 1, 1], layout="constrained"
    )
    for run, style, color in zip(runs, ("-", "--"), ("#4c78a8", "#d1495b"), strict=True):
        steps = range(1, len(run.losses) + 1)
        smooth = [statistics.mean(run.losses[max(0, step - TAIL) : step]) for step in steps]
        curves.plot(steps, run.losses, style, color=color, alpha=0.3)
        curves.plot(steps, smooth, style, color=color, linewidth=2, label=run.name)
    curves.set_xlabel("step")
    curves.set_ylabel("loss (nats per byte)")
    title = f"Training loss, each step (thin) and mean of {TAIL} (thick): the curves are equal"
    curves.set_title(title, fontsize=10)
    curves.legend()
    longest = max(stop - start for start, stop in (run.timeline.window for run in runs))
    for axes, run in zip(rows, runs, strict=True):
        bubble = statistics.mean(run.timeline.bubble())
        title = f"{run.name}: forward (blue) and backward (orange), bubble {bubble:.0%}"
        draw(axes, run.timeline, title=title, until_s=longest)
    temporary = path.with_name("quickstart.tmp.png")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)


if __name__ == "__main__":
    main()
