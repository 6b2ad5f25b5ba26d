"""One GPU: are its attention kernels right, how fast are they, what do GPT-3's layers cost there.

    python benchmarks/gpu_profile.py --out FOLDER [--device cuda|cpu] [--minutes 7.5] [--small]

Needs torch and numpy alone (and matplotlib for the picture). Five parts share the time out:

1. every attention kernel, forward and backward, against plain math in fp64;
2. the kernels' speed on rectangles, and which one torch picks;
3. the costs of one layer of GPT3-175B (one rank of tensor parallel 8: its shard of the weights,
   without the communication) and of GPT3-13B, measured in slices and fitted;
4. plans for 48 stages of two 175B layers each, beside no slicing. Communication is not in them,
   nor the embedding and the head;
5. ``result.json``, ``picture.png``, the cost files and the plan files.

The exit code is 1 if a kernel that ran is wrong, or a part failed. Times are medians, in ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

# The checkout's package, on a machine where nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.files import write_text
from terapipe_ds.planner import CostModel, Fit, StageCost, StageMemory, fit_stage, plan, predict
from terapipe_ds.planner.memory import optimizer_bytes
from terapipe_ds.runtime import attention
from terapipe_ds.runtime.kv_context import ContextKV, SequenceContext, current_slice
from terapipe_ds.runtime.profiler import (
    Measurements,
    StageUnderTest,
    chains,
    held_bytes,
    measure,
)
from terapipe_ds.scheme import SliceScheme

SCHEMA = "terapipe-gpu-profile"
VERSION = 1

SEED = 1234
SPEED_ROUNDS = 31
# Sequences of the correctness checks: more than one, so that mixing them up would show.
CHECKED_SEQUENCES = 2
# The largest error that is right, relative to the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# What must run wherever it is tried; the backends by name may be refused.
REQUIRED = ("sdpa", "split", "causal_attention")
COMPARED = ("output", "dQ", "dK", "dV")
# What a kernel leaves in autograd's graph.
MARKS = {
    "FlashAttention": "flash",
    "EfficientAttention": "efficient",
    "CudnnAttention": "cudnn",
    "_Split": "split",
}

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A transformer layer; with tensor parallelism, one rank's shard of it."""

    name: str
    hidden: int
    heads: int
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Size:
    """What ``--small`` makes smaller.

    Attributes:
        rectangles: (slice length, context) in tokens, whose results are checked.
        cuts: lengths of slices that are checked as a chain.
        heads: (query heads, key/value heads): all alike, groups, one for all.
        widths: head widths.
        speed: rectangles whose kernels are timed.
        speed_heads: (heads, head width) for that.
        layers: to be profiled; the first is also planned for.
        seq_length: tokens of a sequence, for profiles and plans.
        granularity: slice lengths of plans are multiples of this.
        stages: of the planned pipeline.
        layers_per_stage: there.
        sequences: of a step there.
    """

    rectangles: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    speed: tuple[tuple[int, int], ...]
    speed_heads: tuple[int, int]
    layers: tuple[Layer, Layer]
    seq_length: int
    granularity: int
    stages: int
    layers_per_stage: int = 2
    sequences: int = 2


FULL = Size(
    rectangles=((128, 0), (128, 384), (64, 1984), (1, 255), (200, 57)),
    cuts=((128,) * 8, (1, 255, 200, 57, 511), (776, 640, 632)),
    heads=((8, 8), (8, 2), (8, 1)),
    widths=(64, 128),
    speed=(
        *((2048, 0), (1024, 0), (1024, 1024), (512, 1536), (256, 0), (256, 1792)),
        *((128, 0), (128, 1920), (64, 1984), (8, 0), (8, 2040)),
    ),
    speed_heads=(12, 128),
    layers=(
        Layer("gpt3-175b-tp8", hidden=12288, heads=96, tensor_parallel=8),
        Layer("gpt3-13b", hidden=5120, heads=40),
    ),
    seq_length=2048,
    granularity=8,
    stages=48,
)
SMALL = Size(
    rectangles=((16, 0), (16, 48), (1, 31), (20, 7)),
    cuts=((16, 16, 32), (1, 31, 25, 7)),
    heads=((4, 4), (4, 2), (4, 1)),
    widths=(16,),
    speed=((64, 0), (16, 48)),
    speed_heads=(4, 16),
    layers=(
        Layer("gpt3-175b-tp8", hidden=64, heads=4, tensor_parallel=2),
        Layer("gpt3-13b", hidden=64, heads=4),
    ),
    seq_length=128,
    granularity=8,
    stages=4,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all parts; returns the exit code."""
    args = _arguments(argv)
    size = SMALL if args.small else FULL
    device = torch.device(args.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("highest")
    run = Run(args.out, Clock(60 * args.minutes), _header(args, device))
    costs: dict[str, CostModel] = {}
    # Refusals say why in warnings, which are recorded where they count.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.part("kernels", 0.3, lambda end: check_kernels(size, device, end), _print_kernels)
        run.part("speed", 0.2, lambda end: time_kernels(size, device, end), _print_speed)
        for layer, share in zip(size.layers, (0.45, 0.7), strict=True):
            work = partial(_profile_into, costs, layer, size, device, args.out)
            run.part(f"profile {layer.name}", share, work, _print_fit)
    cost = costs.get(size.layers[0].name)
    if cost is not None:
        run.part("plans", 1.0, lambda end: make_plans(cost, size, end, args.out), _print_plans)
    profiles = [found for name, found in run.result.items() if name.startswith("profile ")]
    if profiles:
        machine = run.result["machine"]["name"]
        run.part("picture", 1.0, lambda end: draw(profiles, args.out, machine), _print_picture)
    return 0 if run.finish() else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder for all files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all parts together")
    parser.add_argument("--small", action="store_true", help="small shapes, for a test")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: found cuda, but torch sees no CUDA device; allowed here is cpu")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes: found {args.minutes}, allowed is a time above 0")
    return args


def _header(args: argparse.Namespace, device: torch.device) -> Row:
    """What is known before the first part."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "small": args.small,
        "minutes": args.minutes,
        "machine": _machine(device),
        "ok": False,
        "failed": {},
        "seconds": {},
    }


def _machine(device: torch.device) -> Row:
    found: Row = {
        "device": device.type,
        "name": _device_name(device),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


class Clock:
    """Shares the time out: a part gets a share of what is left when it starts."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def deadline(self, share: float) -> float:
        """When a part must end, in seconds of ``time.monotonic``."""
        now = time.monotonic()
        return now + share * max(0.0, self._end - now)


class Run:
    """The result so far; it is written after each part, so that little is lost if the machine goes.

    Args:
        out: the folder.
        clock: the time for all parts.
        result: what is known before the first part.
    """

    def __init__(self, out: Path, clock: Clock, result: Row) -> None:
        self.out, self.clock, self.result = out, clock, result

    def part(
        self, name: str, share: float, work: Callable[[float], Any], show: Callable[[Any], None]
    ) -> None:
        """Runs one part, notes its time, prints what it found; a failure does not stop the rest.

        Args:
            name: of the part, in the result too.
            share: of the time that is left.
            work: gets the deadline, returns what is found.
            show: prints it.
        """
        started = time.monotonic()
        try:
            self.result[name] = work(self.clock.deadline(share))
            show(self.result[name])
        except Exception as error:
            self.result["failed"][name] = traceback.format_exc()
            print(f"\n{name}: FAILED, {type(error).__name__}: {error}")
        self.result["seconds"][name] = time.monotonic() - started
        sys.stdout.flush()
        self._write()

    def finish(self) -> bool:
        """Whether all is right: no kernel wrong, no part failed."""
        right = self.result.get("kernels", {}).get("ok", False)
        self.result["ok"] = right and not self.result["failed"]
        self._write()
        seconds = ", ".join(f"{name} {s:.0f} s" for name, s in self.result["seconds"].items())
        print(f"\n{seconds}\n{self.out}: {'all right' if self.result['ok'] else 'NOT RIGHT'}")
        return self.result["ok"]

    def _write(self) -> None:
        write_text(self.out / "result.json", json.dumps(self.result, indent=1) + "\n")


# Part 1: correctness.


@dataclass(frozen=True)
class Ran:
    """A kernel's output, dQ, dK and dV, and which kernel torch took."""

    tensors: list[Tensor]
    kernel: str


class Refused(Exception):
    """torch does not run this kernel on these tensors; the message says why."""


def check_kernels(size: Size, device: torch.device, deadline: float) -> Row:
    """Every kernel on every shape, in every dtype, against plain math in fp64."""
    dtypes = (torch.bfloat16, torch.float32)
    if device.type == "cuda":
        dtypes = (*dtypes, torch.float16)
    rows: list[Row] = []
    skipped = 0
    for dtype, heads, width in product(dtypes, size.heads, size.widths):
        for shape, check in (
            *((rectangle, _check_rectangle) for rectangle in size.rectangles),
            *((lengths, _check_chain) for lengths in size.cuts),
        ):
            if time.monotonic() > deadline:
                skipped += 1
                continue
            rows += check(shape, heads, width, dtype, device)
    return {
        "ok": bool(rows) and all(row["status"] != "wrong" for row in rows),
        "skipped_for_time": skipped,
        "rows": rows,
    }


def _check_rectangle(
    rectangle: tuple[int, int],
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Row]:
    """All kernels on (length, context)."""
    length, context = rectangle
    *qkv, grad = _tensors(length, context, heads, width, dtype, device, sequences=CHECKED_SEQUENCES)
    expected = _expected(qkv, grad)
    about = _about(dtype, heads, width) | {"length": length, "context": context}
    return [
        _judged({"kernel": name} | about, partial(_run, kernel, qkv, grad), expected)
        for name, kernel in kernels(device, context).items()
    ]


def _check_chain(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Row]:
    """What layers call, slice by slice, with the keys and values of earlier slices kept."""
    *qkv, grad = _tensors(sum(lengths), 0, heads, width, dtype, device, sequences=CHECKED_SEQUENCES)
    about = {"kernel": "causal_attention"} | _about(dtype, heads, width)
    about["lengths"] = list(lengths)
    return [_judged(about, partial(_run_chain, lengths, qkv, grad), _expected(qkv, grad))]


def kernels(device: torch.device, context: int) -> dict[str, Kernel]:
    """``sdpa`` as torch dispatches it and with each backend alone, and ``split`` where it runs."""
    found: dict[str, Kernel] = {"sdpa": lambda *qkv: attention.sdpa(*qkv)}
    for name, backend in BACKENDS.items():
        found[f"sdpa {name}"] = partial(_with_backend, backend)
    if device.type == "cpu" and context > 0:
        found["split"] = _split
    return found


def _with_backend(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return attention.sdpa(query, key, value)


def _split(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    start = key.shape[0] - query.shape[0]
    kv = ContextKV((key[:start], value[:start]), (key[start:], value[start:]))
    return attention.split(query, kv)


def _tensors(
    length: int,
    context: int,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sequences: int,
) -> list[Tensor]:
    """Q ``[l, b, n, d]``, K and V ``[t, b, g, d]``, and the gradient of the output."""
    generator = torch.Generator().manual_seed(SEED)
    (n, g), total = heads, context + length
    shapes = ((length, n), (total, g), (total, g), (length, n))
    return [
        torch.randn(tokens, sequences, count, width, generator=generator).to(device, dtype)
        for tokens, count in shapes
    ]


def _expected(qkv: list[Tensor], grad: Tensor) -> list[Tensor]:
    exact = [tensor.double() for tensor in qkv]
    return _run(attention.plain_math, exact, grad.double()).tensors


def _run(kernel: Kernel, qkv: list[Tensor], grad: Tensor) -> Ran:
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    output = kernel(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad)
    return Ran([output.detach(), *gradients], _taken(output))


def _run_chain(lengths: Sequence[int], qkv: list[Tensor], grad: Tensor) -> Ran:
    """Forward first to last, backward last to first, as the engine runs slices."""
    ranges = SliceScheme([(grad.shape[1], list(lengths))]).groups[0].ranges()
    context, owner = SequenceContext(), object()
    leaves = [
        [tensor[tokens.as_slice].detach().requires_grad_() for tensor in qkv] for tokens in ranges
    ]
    outputs = []
    for tokens, own in zip(ranges, leaves, strict=True):
        with current_slice(tokens, context):
            outputs.append(attention.causal_attention(owner, *own))
    taken = sorted({_taken(output) for output in outputs})
    for tokens, output in reversed(list(zip(ranges, outputs, strict=True))):
        with current_slice(tokens, context, backward=True):
            output.backward(grad[tokens.as_slice])
    gradients = [torch.cat([own[which].grad for own in leaves]) for which in range(3)]
    return Ran([torch.cat(outputs).detach(), *gradients], ", ".join(taken))


def _taken(output: Tensor) -> str:
    """Which kernel computed it, from the names in autograd's graph; plain ``math`` if none did."""
    waiting, met = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        for mark, kernel in MARKS.items():
            if mark in node.name():
                return kernel
        waiting += [following for following, _ in node.next_functions]
    return "math"


def _attempt(work: Callable[[], Ran], device: torch.device) -> Ran:
    """Runs a kernel, and waits for it.

    Raises:
        Refused: if torch does not run it, with torch's reasons.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ran = work()
            _synchronize(device)
        except RuntimeError as error:
            reasons = [str(error), *(str(warning.message) for warning in said)]
            lines = [reason.strip().split("\n")[0][:300] for reason in reasons]
            raise Refused(" | ".join(dict.fromkeys(lines))) from None
    return ran


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _judged(about: Row, work: Callable[[], Ran], expected: list[Tensor]) -> Row:
    """One row: what a kernel gave, how far that is from the truth, and whether it is right."""
    try:
        ran = _attempt(work, expected[0].device)
    except Refused as refusal:
        status = "wrong" if about["kernel"] in REQUIRED else "refused"
        return {**about, "status": status, "reason": str(refusal)}
    pairs = zip(COMPARED, ran.tensors, expected, strict=True)
    errors = {name: _relative_error(found, true) for name, found, true in pairs}
    tolerance = TOLERANCE[ran.tensors[0].dtype]
    right = all(error is not None and error <= tolerance for error in errors.values())
    return {
        **about,
        "ran": ran.kernel,
        "status": "ok" if right else "wrong",
        "tolerance": tolerance,
        "errors": errors,
    }


def _relative_error(found: Tensor, true: Tensor) -> float | None:
    """The largest error relative to the largest value; None if something is not finite."""
    error = float((found.double() - true).abs().max() / true.abs().max())
    return error if math.isfinite(error) else None


def _about(dtype: torch.dtype, heads: tuple[int, int], width: int) -> Row:
    return {"dtype": _name(dtype), "heads": list(heads), "width": width}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print_kernels(found: Row) -> None:
    print("\nAttention against plain math in fp64 (worst relative error of output, dQ, dK, dV)")
    print(f"  {'kernel':18}{'dtype':10}{'right':>6}{'wrong':>7}{'refused':>9}{'worst':>10}  ran")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found["rows"]:
        groups.setdefault((row["kernel"], row["dtype"]), []).append(row)
    for (kernel, dtype), rows in groups.items():
        right, wrong, refused = (
            sum(row["status"] == status for row in rows) for status in ("ok", "wrong", "refused")
        )
        errors = [error for row in rows for error in row.get("errors", {}).values()]
        worst = "infinite" if None in errors else f"{max(errors):.1e}" if errors else "-"
        ran = ", ".join(sorted({row["ran"] for row in rows if "ran" in row})) or "-"
        print(f"  {kernel:18}{dtype:10}{right:>6}{wrong:>7}{refused:>9}{worst:>10}  {ran}")
    if found["skipped_for_time"]:
        print(f"  {found['skipped_for_time']} shapes were left out for lack of time")
    for row in found["rows"]:
        if row["status"] == "wrong":
            print(f"  WRONG: {row}")


# Part 2: speed.


@dataclass
class Timed:
    """A kernel on a rectangle, and its times in ms, forward and backward together."""

    length: int
    context: int
    kernel: str
    ran: str
    work: Callable[[], Ran]
    times: list[float] = field(default_factory=list)

    def run(self, device: torch.device) -> None:
        """Runs it once more, its launches included."""
        _synchronize(device)
        start = time.perf_counter()
        self.work()
        _synchronize(device)
        self.times.append((time.perf_counter() - start) * 1e3)


def time_kernels(size: Size, device: torch.device, deadline: float) -> Row:
    """Times all kernels on all rectangles, in turns."""
    dtype = _layer_dtype(device)
    heads, width = size.speed_heads
    timed: list[Timed] = []
    refused: list[Row] = []
    skipped = 0
    for length, context in size.speed:
        if time.monotonic() > deadline:
            skipped += 1
            continue
        *qkv, grad = _tensors(length, context, (heads, heads), width, dtype, device, sequences=1)
        for name, kernel in kernels(device, context).items():
            work = partial(_run, kernel, qkv, grad)
            try:
                ran = _attempt(work, device)
            except Refused as refusal:
                where = {"length": length, "context": context, "kernel": name}
                refused.append({**where, "reason": str(refusal)})
                continue
            timed.append(Timed(length, context, name, ran.kernel, work))
    for _ in range(SPEED_ROUNDS):
        for entry in timed:
            if time.monotonic() > deadline and entry.times:
                break
            entry.run(device)
    return {
        "dtype": _name(dtype),
        "heads": heads,
        "width": width,
        "skipped_for_time": skipped,
        "rows": [_speed_row(entry) for entry in timed],
        "refused": refused,
    }


def _speed_row(entry: Timed) -> Row:
    return {
        "length": entry.length,
        "context": entry.context,
        "kernel": entry.kernel,
        "ran": entry.ran,
        "ms": statistics.median(entry.times),
        "rounds": len(entry.times),
        "raw_ms": entry.times,
    }


def _print_speed(found: Row) -> None:
    names = list(dict.fromkeys(row["kernel"] for row in found["rows"]))
    print(
        f"\nForward and backward in ms, {found['dtype']}, {found['heads']} heads of "
        f"{found['width']}, one sequence"
    )
    columns = "".join(f"{name:>16}" for name in names)
    print(f"  {'length':>6}{'context':>9}{columns}  torch picks")
    by_shape: dict[tuple[int, int], dict[str, Row]] = {}
    for row in found["rows"]:
        by_shape.setdefault((row["length"], row["context"]), {})[row["kernel"]] = row
    for (length, context), rows in by_shape.items():
        times = "".join(f"{rows[n]['ms']:>16.3f}" if n in rows else f"{'-':>16}" for n in names)
        picked = rows["sdpa"]["ran"] if "sdpa" in rows else "-"
        print(f"  {length:>6}{context:>9}{times}  {picked}")
    if found["skipped_for_time"]:
        print(f"  {found['skipped_for_time']} rectangles were left out for lack of time")


# Part 3: what a layer costs.


class DecoderLayer(nn.Module):
    """A GPT layer on ``[l, b, h]``, as megatron lays it out; one tensor-parallel rank's shard.

    The shard's products have the sizes that they have on that rank; its sums with the other ranks'
    are left out.
    """

    def __init__(self, layer: Layer, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, parts = layer.hidden, layer.tensor_parallel
        own = {"device": device, "dtype": dtype}
        self.heads = layer.heads // parts
        self.attention_norm = nn.LayerNorm(hidden, **own)
        self.qkv = nn.Linear(hidden, 3 * hidden // parts, **own)
        self.projection = nn.Linear(hidden // parts, hidden, **own)
        self.mlp_norm = nn.LayerNorm(hidden, **own)
        self.up = nn.Linear(hidden, 4 * hidden // parts, **own)
        self.down = nn.Linear(4 * hidden // parts, hidden, **own)

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(hidden))
        query, key, value = qkv.view(*hidden.shape[:2], self.heads, -1).chunk(3, dim=-1)
        attended = attention.causal_attention(self, query, key, value)
        hidden = hidden + self.projection(attended.flatten(2))
        inner = functional.gelu(self.up(self.mlp_norm(hidden)), approximate="tanh")
        return hidden + self.down(inner)


def _layer_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _profile_into(
    costs: dict[str, CostModel],
    layer: Layer,
    size: Size,
    device: torch.device,
    out: Path,
    deadline: float,
) -> Row:
    """Profiles a layer, saves its costs, and keeps them for the plans."""
    cost, rounds = profile(layer, size, device, deadline)
    path = out / f"cost-{layer.name}.json"
    cost.save(path)
    costs[layer.name] = cost
    return _profile_row(cost, rounds, path)


def profile(
    layer: Layer, size: Size, device: torch.device, deadline: float
) -> tuple[CostModel, int]:
    """Measures and fits one layer, one sequence at a time.

    Returns:
        Its costs, and how many rounds every chain has had.
    """
    dtype = _layer_dtype(device)
    module = DecoderLayer(layer, device, dtype)
    stage = StageUnderTest(
        run=module,
        inputs=lambda b, tokens: torch.randn(
            tokens.length, b, layer.hidden, device=device, dtype=dtype, requires_grad=True
        ),
        parameters=list(module.parameters()),
        device=device,
    )
    found = Measurements(chains(size.seq_length, sequences=(1,), granularity=size.granularity))
    measure(stage, found, budget_s=max(0.0, deadline - time.monotonic()))
    held = held_bytes(stage, sequences=1, tokens=size.seq_length // 8)
    count = sum(parameter.numel() for parameter in module.parameters())
    memory = StageMemory(
        parameters=count * dtype.itemsize,
        gradients=count * dtype.itemsize,
        optimizer=optimizer_bytes(count, half=dtype.itemsize == 2),
        activation_per_token=held.activations,
        kv_per_token=held.kv,
    )
    about = {
        **asdict(layer),
        "layers": 1,
        "dtype": _name(dtype),
        "device": _device_name(device),
        "torch": torch.__version__,
        "communication": "none",
    }
    fitted = fit_stage(layer.name, found.samples(), memory=memory)
    cost = CostModel(stages=(fitted,), seq_length=size.seq_length, about=about)
    return cost, min(len(rounds) for rounds in found.rounds)


def _profile_row(cost: CostModel, rounds: int, path: Path) -> Row:
    stage = cost.stages[0]
    points = [
        {
            **sample._asdict(),
            "ms": sample.forward_ms + sample.backward_ms,
            "predicted_ms": float(stage.time(*sample[:3])),
        }
        for sample in stage.samples
    ]
    return {
        "about": dict(cost.about),
        "file": path.name,
        "rounds": rounds,
        "form": stage.forward.form,
        "held_out_error": stage.error,
        "errors": dict(stage.errors),
        "memory": asdict(stage.memory) if stage.memory is not None else None,
        "points": points,
    }


def _print_fit(found: Row) -> None:
    about = found["about"]
    print(
        f"\nOne layer of {about['name']} (hidden {about['hidden']}, tensor parallel "
        f"{about['tensor_parallel']}, {about['dtype']}), at least {found['rounds']} rounds"
    )
    print(f"  {'length':>6}{'forward ms':>12}{'backward ms':>13}{'tokens/ms':>11}  without context")
    for point in _without_context(found):
        speed = point["length"] / point["ms"]
        times = f"{point['forward_ms']:>12.3f}{point['backward_ms']:>13.3f}"
        print(f"  {point['length']:>6}{times}{speed:>11.1f}")
    errors = ", ".join(f"{form} {error:.1%}" for form, error in found["errors"].items())
    print(f"  median error on what the fit has not seen: {errors}; taken: {found['form']}")


def _without_context(found: Row) -> list[Row]:
    """The first slices of all chains, by length; one for each length."""
    first = {point["length"]: point for point in found["points"] if point["context"] == 0}
    return [first[length] for length in sorted(first)]


# Part 4: plans.


def make_plans(cost: CostModel, size: Size, deadline: float, out: Path) -> list[Row]:
    """Plans for both schedules and both objectives, beside no slicing.

    Only groups of one sequence: that is what was measured.
    """
    stage_cost = of_layers(cost, size.layers_per_stage)
    name = cost.about["name"]
    rows = []
    for schedule, objective in product(("gpipe", "1f1b"), ("paper", "simulate")):
        if time.monotonic() > deadline:
            print(f"\nplan for {schedule}, {objective}: left out for lack of time")
            continue
        found = plan(
            stage_cost,
            seq_length=size.seq_length,
            stages=size.stages,
            sequences=size.sequences,
            granularity=size.granularity,
            objective=objective,
            schedule=schedule,
            group_sizes=(1,),
        )
        path = out / f"plan-{name}-{objective}-{schedule}.json"
        found.save(path)
        step = {"stages": size.stages, "schedule": schedule}
        simulated, unsliced = (
            predict(stage_cost, scheme, **step).makespan_ms
            for scheme in (found.scheme, found.unsliced.scheme)
        )
        rows.append(
            {
                "file": path.name,
                "schedule": schedule,
                "objective": objective,
                "stages": size.stages,
                "scheme": str(found.scheme),
                "slices": found.scheme.slices,
                "latency_ms": found.latency_ms,
                "unsliced_ms": found.unsliced.latency_ms,
                "speedup": found.speedup,
                "simulated_ms": simulated,
                "simulated_unsliced_ms": unsliced,
            }
        )
    return rows


def of_layers(cost: CostModel, layers: int) -> CostModel:
    """The costs of a stage of so many layers, from those of one.

    A little too high for short slices: each measured time holds one wait for the device.
    """
    (one,) = cost.stages
    memory = one.memory and StageMemory(**{k: layers * v for k, v in asdict(one.memory).items()})
    stage = StageCost(
        name=f"{layers} layers",
        forward=_fit_of_layers(one.forward, layers),
        backward=_fit_of_layers(one.backward, layers),
        error=one.error,
        errors=one.errors,
        memory=memory,
    )
    return replace(cost, stages=(stage,), about={**cost.about, "layers": layers})


def _fit_of_layers(fit: Fit, layers: int) -> Fit:
    a0, a1 = fit.jump
    return replace(
        fit,
        base_ms=tuple(layers * ms for ms in fit.base_ms),
        jump=(layers * a0, layers * a1),
        price_ms=tuple(layers * ms for ms in fit.price_ms),
        least_ms=layers * fit.least_ms,
    )


def _print_plans(rows: list[Row]) -> None:
    if not rows:
        return
    print(f"\nPlans for {rows[0]['stages']} stages, in ms of a step (no communication)")
    print(f"  {'schedule':9}{'objective':10}{'no slices':>10}{'plan':>9}{'faster':>8}  scheme")
    for row in rows:
        times = f"{row['unsliced_ms']:>10.1f}{row['latency_ms']:>9.1f}{row['speedup']:>7.2f}x"
        print(f"  {row['schedule']:9}{row['objective']:10}{times}  {row['scheme']}")


# Part 5: the picture.


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


def _print_picture(found: str | None) -> None:
    print(f"\npicture: {found or 'left out, matplotlib is not installed'}")


def _draw_layer(times: Any, speeds: Any, found: Row, color: str) -> None:
    points = _without_context(found)
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


if __name__ == "__main__":
    sys.exit(main())
