"""Stock DeepSpeed against token slices on two CPU cores: how much faster, and where the rest went.

    python benchmarks/stock_vs_sliced.py [--json FILE]

Two pipeline ranks, one core and one thread each, train a GPT of 8 layers of width 512 on one
micro-batch of one sequence of 2048 tokens. Three engines take turns in one run: stock DeepSpeed,
one slice (which shows what the engine itself costs), and the slices under test. All use the same
layers and the same attention kernel. Numbers are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launching import launch, pin_to_core

SEQ_LENGTH = 2048
HIDDEN = 512
HEADS = 8
LAYERS = 8
VOCAB = 4096
STAGES = 2
TARGET_SPEEDUP = 1.4
TARGET_OVERHEAD = 0.03


def main() -> None:
    args = _arguments()
    if "RANK" not in os.environ:
        sys.exit(launch(__file__, STAGES))
    pin_to_core()
    result = _measure(args)
    if result is None:
        return
    _print(result)
    met = result["speedup"] >= TARGET_SPEEDUP and result["one_slice_overhead"] <= TARGET_OVERHEAD
    print(
        f"\ntargets (at least {TARGET_SPEEDUP}x, one slice at most {TARGET_OVERHEAD:+.0%}): "
        f"{'met' if met else 'missed'}"
    )
    if args.json is not None:
        temporary = args.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        temporary.replace(args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--slices", type=int, default=8, help="even slices of the sequence")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each engine")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


@dataclass
class Contender:
    """An engine, its times, and the timelines of its steps."""

    name: str
    engine: Any
    seconds: list[float] = field(default_factory=list)
    timelines: list[Any] = field(default_factory=list)


def _measure(args: argparse.Namespace) -> dict[str, Any] | None:
    import deepspeed
    import torch

    import terapipe_ds
    from terapipe_ds.models.gpt import batch

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    generator = torch.Generator().manual_seed(1234)
    text = torch.randint(0, VOCAB, (1, SEQ_LENGTH + 1), generator=generator)
    data = batch(text[:, :-1], text[:, 1:])

    contenders = []
    for name, block in (
        ("stock", None),
        ("one slice", {"slices": 1}),
        ("sliced", {"slices": args.slices}),
    ):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
            **({} if block is None else {"terapipe": block}),
        }
        engine = terapipe_ds.initialize(model=module, optimizer=optimizer, config=config)[0]
        contenders.append(Contender(name, engine))

    rank = torch.distributed.get_rank()
    for repeat in range(1 + args.repeats):
        # Each round starts with another one, so that none always follows the same neighbour.
        for offset in range(len(contenders)):
            _step(contenders[(repeat + offset) % len(contenders)], data, warm_up=repeat == 0)
        if rank == 0:
            times = ", ".join(f"{c.name} {c.seconds[-1]:.2f} s" for c in contenders if c.seconds)
            print(f"round {repeat} of {args.repeats}: {times or 'warm-up'}", flush=True)
    attention = _attention_growth(args.slices, args.repeats) if rank == 0 else None
    torch.distributed.barrier()
    return _result(contenders, attention, args) if rank == 0 else None


def model() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from terapipe_ds.models.gpt import gpt_pipeline

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return gpt_pipeline(config, vocab_size=VOCAB, seq_length=SEQ_LENGTH, num_stages=STAGES)


def _step(contender: Contender, data: Any, *, warm_up: bool) -> None:
    import torch

    from terapipe_ds.runtime.recorder import gather, recorded

    torch.distributed.barrier()
    with recorded(contender.engine) as spans:
        start = time.perf_counter()
        contender.engine.train_batch(iter([data]))
        torch.distributed.barrier()
        seconds = time.perf_counter() - start
    timeline = gather(contender.engine, spans)
    if not warm_up:
        contender.seconds.append(seconds)
        contender.timelines.append(timeline)


def _attention_growth(slices: int, repeats: int) -> float:
    """Seconds by which one stage's attention takes longer in slices than whole.

    Measured apart, on this rank alone: the kernels of all layers of a stage, forward and backward.
    """
    import torch

    from terapipe_ds.runtime.attention import causal_attention
    from terapipe_ds.runtime.kv_context import SequenceContext, current_slice
    from terapipe_ds.scheme import SliceScheme

    shape = (SEQ_LENGTH, 1, HEADS, HIDDEN // HEADS)
    query, key, value, grad = (torch.randn(shape) for _ in range(4))

    def run(count: int) -> float:
        scheme = SliceScheme.even(sequences=1, seq_length=SEQ_LENGTH, count=count)
        context = SequenceContext()
        outputs = []
        start = time.perf_counter()
        for tokens in scheme.groups[0].ranges():
            own = slice(tokens.start, tokens.stop)
            parts = [tensor[own].requires_grad_() for tensor in (query, key, value)]
            with current_slice(tokens, context):
                outputs.append((causal_attention(run, *parts), grad[own]))
        for output, output_grad in reversed(outputs):
            output.backward(output_grad)
        return time.perf_counter() - start

    times = {count: [] for count in (1, slices)}
    for _ in range(repeats):
        for count, measured in times.items():
            measured.append(run(count))
    layers = LAYERS // STAGES
    return layers * (statistics.median(times[slices]) - statistics.median(times[1]))


def _result(
    contenders: list[Contender], attention: float, args: argparse.Namespace
) -> dict[str, Any]:
    stock, _, sliced = contenders
    medians = {c.name: statistics.median(c.seconds) for c in contenders}
    return {
        "speedup": medians["stock"] / medians["sliced"],
        "one_slice_overhead": medians["one slice"] / medians["stock"] - 1,
        "slices": args.slices,
        "limit": STAGES * args.slices / (STAGES + args.slices - 1),
        "seconds": medians,
        "raw_seconds": {c.name: c.seconds for c in contenders},
        "bubble": {
            c.name: statistics.median(statistics.mean(t.bubble()) for t in c.timelines)
            for c in contenders
        },
        "where_the_time_goes": _breakdown(stock, sliced, attention),
    }


def _breakdown(stock: Contender, sliced: Contender, attention: float) -> dict[str, float]:
    """The median sliced step's seconds, mean over stages, as parts that add up.

    ``messages`` is the time that a stage waited although its neighbour had already computed what it
    waited for, ``bubble`` the rest of its waiting. ``engine`` is the time between instructions.
    """
    work = statistics.median(statistics.mean(t.busy()) for t in stock.timelines)
    total, timeline = sorted(zip(sliced.seconds, sliced.timelines, strict=True), key=_seconds)[
        len(sliced.seconds) // 2
    ]
    parts = _parts(timeline)
    engine = total - sum(parts.values())
    growth = parts.pop("compute") - work
    return {
        "total": total,
        "work of a stage as in stock": work,
        "attention in slices": attention,
        "smaller products and gradient sums": growth - attention,
        **parts,
        "engine": engine,
    }


def _seconds(step: tuple[float, Any]) -> float:
    return step[0]


def _parts(timeline: Any) -> dict[str, float]:
    ends = {
        (stage, span.what, span.micro_batch, span.slice): span.stop
        for stage, spans in enumerate(timeline.stages)
        for span in spans
    }
    source = {"RecvActivationSlice": ("F", -1), "RecvGradSlice": ("B", 1)}
    parts = dict.fromkeys(("compute", "bubble", "messages", "gradients and optimizer"), 0.0)
    for stage, spans in enumerate(timeline.stages):
        for span in spans:
            if span.what in ("F", "B"):
                parts["compute"] += span.seconds
            elif span.what in source:
                kind, step = source[span.what]
                ready = ends[stage + step, kind, span.micro_batch, span.slice]
                bubble = min(max(0.0, ready - span.start), span.seconds)
                parts["bubble"] += bubble
                parts["messages"] += span.seconds - bubble
            elif span.what.startswith("Send"):
                parts["messages"] += span.seconds
            else:
                # Reductions wait for the stage whose last backward ends last.
                bubble = min(max(0.0, timeline.window[1] - span.start), span.seconds)
                parts["bubble"] += bubble
                parts["gradients and optimizer"] += span.seconds - bubble
    return {name: seconds / len(timeline.stages) for name, seconds in parts.items()}


def _print(result: dict[str, Any]) -> None:
    seconds, bubble = result["seconds"], result["bubble"]
    print(f"\n{'':24}{'stock':>10}{'one slice':>12}{'sliced':>10}")
    print("seconds per step (median)" + "".join(f"{seconds[name]:>10.3f}" for name in seconds))
    print("bubble                   " + "".join(f"{bubble[name]:>10.0%}" for name in bubble))
    print(
        f"\nspeedup {result['speedup']:.2f}x with {result['slices']} slices "
        f"(the limit of the schedule is {result['limit']:.2f}x)\n"
        f"one slice against stock: {result['one_slice_overhead']:+.1%}\n\n"
        "Where a sliced step's time goes (mean of stages)"
    )
    for name, part in result["where_the_time_goes"].items():
        share = part / result["where_the_time_goes"]["total"]
        print(f"  {name:<36}{part:>8.3f} s {share:>6.1%}")


if __name__ == "__main__":
    main()
