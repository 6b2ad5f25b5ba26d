"""What ``cuda_check.py`` checks, on each of its two ranks.

Shapes: ``b`` sequences, ``L`` tokens, ``l`` of a slice, ``v`` vocabulary entries.
"""

from __future__ import annotations

import gc
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.pipe.schedule import OptimizerStep
from late_transfers import late_transfers
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

import terapipe_ds
from terapipe_ds.models.gpt import batch, gpt_pipeline
from terapipe_ds.runtime import attention
from terapipe_ds.runtime.deepspeed_seams import let_gloo_carry_device_tensors
from terapipe_ds.runtime.kv_context import LayerKV, SequenceContext, current_slice
from terapipe_ds.scheme import SliceScheme

SEED = 20210216
STAGES = 2
TIMEOUT_S = 60

# The largest relative differences that are right.
GRADIENT_LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
KERNEL_LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# How many times stock's error a sliced gradient may have in bf16, which adds one more rounding for
# each slice; an error below bf16's own rounding counts as that.
BF16_RATIO = 1.5
BF16_ROUNDING = 2.0**-8
# By how much clocks of device and host may disagree about a step.
CLOCK_S = 0.05

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Shapes of a device's check.

    Attributes:
        slices: a cut of the sequence.
        groups: a cut for each of two sequences.
        micro_batches: of a step.
        hidden: width of the model.
        heads: of attention; a quarter of them with grouped queries.
        layers: transformer layers.
        vocab: entries.
        cuts: of sequences whose attention is checked; the last of two slices is a rectangle.
        widths: of attention's heads there.
        kernel_dtypes: there.
    """

    slices: tuple[int, ...]
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    micro_batches: int
    hidden: int
    heads: int
    layers: int
    vocab: int
    cuts: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    kernel_dtypes: tuple[torch.dtype, ...]

    @property
    def seq_length(self) -> int:
        return sum(self.slices)


SIZES = {
    "cuda": Size(
        slices=(200, 57, 128, 127),
        groups=((300, 212), (129, 190, 193)),
        micro_batches=3,
        hidden=512,
        heads=8,
        layers=4,
        vocab=1024,
        cuts=((512,), (384, 128), (1984, 64), (255, 1), (57, 200), (200, 57, 128, 127)),
        widths=(64, 128),
        kernel_dtypes=(torch.float32, torch.bfloat16, torch.float16),
    ),
    "cpu": Size(
        slices=(7, 30, 11),
        groups=((17, 31), (5, 25, 18)),
        micro_batches=2,
        hidden=32,
        heads=4,
        layers=2,
        vocab=64,
        cuts=((16,), (48, 16), (31, 1), (7, 20), (7, 30, 11)),
        widths=(16,),
        kernel_dtypes=(torch.float32, torch.bfloat16),
    ),
}


class Line(NamedTuple):
    """One thing that was compared.

    Attributes:
        what: it is, with the worst place.
        difference: the largest on any rank; infinite where something is not finite.
        limit: the largest that is right.
    """

    what: str
    difference: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.limit


@dataclass(frozen=True)
class Rig:
    """Where and how large.

    Attributes:
        device: of both ranks.
        size: of what runs.
        folder: that both ranks write to.
    """

    device: torch.device
    size: Size
    folder: Path


def set_up(device: str, folder: Path) -> Rig:
    """Connects the ranks over gloo, with tensors of the device."""
    torch.set_float32_matmul_precision("highest")
    let_gloo_carry_device_tensors()
    # Before DeepSpeed, which would bind a device to the group: see let_gloo_carry_device_tensors.
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    return Rig(torch.device(device), SIZES[device], folder)


# Models, engines, gradients.


@dataclass(frozen=True)
class Model:
    """A kind of GPT."""

    name: str
    rope: bool
    grouped_queries: bool
    tied_head: bool


PLAIN = Model("learned positions, tied head", rope=False, grouped_queries=False, tied_head=True)
LLAMA = Model("rope, grouped queries", rope=True, grouped_queries=True, tied_head=False)


def module_of(
    rig: Rig,
    model: Model,
    dtype: torch.dtype = torch.float32,
    *,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    **config: Any,
) -> Any:
    """This rank's stage; the same weights for the same model."""
    size = rig.size
    llama = model.rope
    transformer = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.heads // 4 if model.grouped_queries else size.heads,
        hidden_dropout=dropout,
        attention_dropout=attention_dropout,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=functional.silu if llama else functional.gelu,
        add_bias_linear=not llama,
        params_dtype=dtype,
        **config,
    )
    # For tied layers: see let_gloo_carry_device_tensors. Parameters are trainable all the same.
    with torch.no_grad():
        module = gpt_pipeline(
            transformer,
            vocab_size=size.vocab,
            seq_length=size.seq_length,
            num_stages=STAGES,
            position_embedding_type="rope" if model.rope else "learned_absolute",
            tied_head=model.tied_head,
            loss_fn=mean_loss,
            loss_is_token_mean=True,
            seed=SEED,
        )
    # An earlier model of this process has moved the random states on.
    torch.manual_seed(SEED + module.stage_id)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED + module.stage_id)
    return module


def mean_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over valid tokens of ``[l, b, v]``, in fp32 or wider; no tensor-parallel messages."""
    targets, mask = labels
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.transpose(0, 1).flatten(), reduction="none"
    )
    weights = mask.transpose(0, 1).flatten().to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def batches(rig: Rig) -> list[Any]:
    """A step's micro-batches of two sequences, some tokens of which do not count."""
    size = rig.size
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for _ in range(size.micro_batches):
        text = torch.randint(0, size.vocab, (2, size.seq_length + 1), generator=generator)
        mask = (torch.rand(2, size.seq_length, generator=generator) < 0.7).float()
        mask[:, : size.seq_length // 6] = 0
        made.append(batch(text[:, :-1], text[:, 1:], mask))
    return made


def engine_of(rig: Rig, module: Any, block: dict[str, Any] | None = None, **extra: Any) -> Any:
    """A stock engine, or a sliced one; steps leave the weights as they are."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": rig.size.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **extra,
    }
    if block is not None:
        config["terapipe"] = {"timeout_s": TIMEOUT_S, **block}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine = terapipe_ds.initialize(model=module, optimizer=optimizer, config=config)[0]
    if engine.device.type != rig.device.type:
        raise RuntimeError(f"the engine is on {engine.device}, not on {rig.device}")
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        # DeepSpeed reduces in fp32; a pipeline of one replica has nothing to reduce.
        engine.pipeline_enable_backward_allreduce = False
    return engine


def sliced(rig: Rig, schedule: str, *, groups: bool = False) -> dict[str, Any]:
    """The ``"terapipe"`` block of an uneven cut."""
    size = rig.size
    cut = [[1, list(lengths)] for lengths in size.groups] if groups else list(size.slices)
    return {"slices": cut, "schedule": schedule}


def keep_gradients(engine: Any) -> list[Gradients]:
    """Collects the gradients of each step, just before the optimizer takes them."""
    kept: list[Gradients] = []
    step = engine._INSTRUCTION_MAP[OptimizerStep]

    def keep_and_step(self: Any, **kwargs: Any) -> None:
        kept.append({name: p.grad.clone() for name, p in self.module.named_parameters()})
        step(self, **kwargs)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, OptimizerStep: keep_and_step}
    return kept


def gradients_of(engine: Any, rig: Rig) -> Gradients:
    """Of one step."""
    kept = keep_gradients(engine)
    engine.train_batch(iter(batches(rig)))
    return kept[0]


def relative(found: Tensor, expected: Tensor) -> float:
    """max|difference| / max|expected|."""
    scale = expected.abs().max().item()
    gap = (found.to(expected.dtype) - expected).abs().max().item()
    return _finite(gap / scale if scale else gap)


def largest(name: str, differences: Iterator[tuple[float, str]], limit: float) -> Line:
    """The line of the largest difference on any rank; all ranks call it."""
    mine = max(differences, default=(math.inf, "nothing was compared"))
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    rank = max(range(len(every)), key=lambda r: every[r])
    difference, where = every[rank]
    return Line(f"{name} (worst: {where}, stage {rank})", difference, limit)


def measured(name: str, value: float, limit: float) -> Line:
    """The line of one number on each rank; all ranks call it."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return Line(name, max(every), limit)


def compared(name: str, found: Gradients, expected: Gradients, limit: float) -> Line:
    """The line of two steps' gradients, parameter by parameter."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"{name}: other parameters have gradients")
    pairs = ((relative(found[key], expected[key]), key) for key in expected)
    return largest(name, pairs, limit)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


# Part: gradients.


def gradients(rig: Rig) -> list[Line]:
    """Sliced gradients are those of stock DeepSpeed on the same ranks."""
    lines = []
    for model, dtype, cuts in (
        (LLAMA, torch.float64, (("1f1b", True),)),
        (PLAIN, torch.float32, (("1f1b", False), ("gpipe", False), ("zb-h1", False))),
        (LLAMA, torch.float32, (("1f1b", True), ("gpipe", True), ("zb-h1", True))),
    ):
        expected = gradients_of(engine_of(rig, module_of(rig, model, dtype)), rig)
        for schedule, groups in cuts:
            block = sliced(rig, schedule, groups=groups)
            found = gradients_of(engine_of(rig, module_of(rig, model, dtype), block), rig)
            cut = "groups" if groups else "slices"
            name = f"{_name(dtype)}, {model.name}, {schedule} in uneven {cut}"
            lines.append(compared(name, found, expected, GRADIENT_LIMITS[dtype]))
    return lines + _bf16_gradients(rig)


def _bf16_gradients(rig: Rig) -> list[Line]:
    """The error of bf16 against fp32 with the same weights: sliced, in stock's errors."""
    dtype = torch.bfloat16
    stock = module_of(rig, LLAMA, dtype)
    exact = module_of(rig, LLAMA)
    for parameter, rounded in zip(exact.parameters(), stock.parameters(), strict=True):
        parameter.data.copy_(rounded.data)
    true = gradients_of(engine_of(rig, exact), rig)
    usual = _errors(gradients_of(engine_of(rig, stock), rig), true)
    lines = []
    for schedule in ("1f1b", "zb-h1"):
        block = sliced(rig, schedule)
        found = gradients_of(engine_of(rig, module_of(rig, LLAMA, dtype), block), rig)
        ratios = (
            (error / max(usual[name], BF16_ROUNDING), name)
            for name, error in _errors(found, true).items()
        )
        name = f"bfloat16, {LLAMA.name}, {schedule} in uneven slices, errors over stock's"
        lines.append(largest(name, ratios, BF16_RATIO))
    return lines


def _errors(found: Gradients, true: Gradients) -> dict[str, float]:
    """|difference| / |true|, in the Euclidean norm, of each parameter."""
    return {
        name: _finite(((found[name].double() - exact.double()).norm() / exact.norm()).item())
        for name, exact in true.items()
    }


# Part: attention.


def attention_kernels(rig: Rig) -> list[Line]:
    """The kernels of slices, with and without a window, against plain math in fp64, and back."""
    lines = []
    for dtype, windowed in product(rig.size.kernel_dtypes, (False, True)):
        cases = product(rig.size.cuts, ((8, 8), (8, 2)), rig.size.widths)
        found = [
            (difference, f"slices {list(cut)}, heads {heads}, width {width}")
            for cut, heads, width in cases
            for difference in _attention_differences(rig, dtype, cut, heads, width, windowed)
        ]
        kind = "windows" if windowed else "causal"
        about = f"{_name(dtype)}, {kind}: output, dQ, dK and dV"
        lines.append(largest(about, iter(found), KERNEL_LIMITS[dtype]))
    return lines


def _attention_differences(
    rig: Rig,
    dtype: torch.dtype,
    cut: Sequence[int],
    heads: tuple[int, int],
    width: int,
    windowed: bool,
) -> list[float]:
    """Of output, dQ, dK and dV; other numbers on each rank."""
    total, (n, g) = sum(cut), heads
    window = max(1, total // 3) if windowed else None
    generator = torch.Generator().manual_seed(SEED + torch.distributed.get_rank())
    *qkv, grad = (
        torch.randn(total, 2, count, width, generator=generator).to(rig.device, dtype)
        for count in (n, g, g, n)
    )
    with warnings.catch_warnings():
        # torch says why it does not take a kernel.
        warnings.simplefilter("ignore")
        found = _in_slices(qkv, grad, cut, window)
    leaves = [tensor.double().requires_grad_() for tensor in qkv]
    output = _plain_math(*leaves, window)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


def _in_slices(
    qkv: Sequence[Tensor], grad: Tensor, cut: Sequence[int], window: int | None
) -> list[Tensor]:
    """Forward first to last, backward last to first, as the engine runs slices."""
    ranges = SliceScheme([(grad.shape[1], list(cut))]).groups[0].ranges()
    context, owner = SequenceContext(), object()
    leaves, outputs = [], []
    for tokens in ranges:
        leaves.append([tensor[tokens.as_slice].detach().requires_grad_() for tensor in qkv])
        with current_slice(tokens, context):
            outputs.append(attention.causal_attention(owner, *leaves[-1], window=window))
    for tokens, output in reversed(list(zip(ranges, outputs, strict=True))):
        with current_slice(tokens, context, backward=True):
            output.backward(grad[tokens.as_slice])
    gradients = [torch.cat([own[which].grad for own in leaves]) for which in range(3)]
    return [torch.cat(outputs).detach(), *gradients]


def _plain_math(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """``[L, b, n, d]`` from the whole sequence; a token sees ``window`` tokens before itself."""
    repeats = query.shape[2] // key.shape[2]
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    places = torch.arange(query.shape[0], device=query.device)
    before = places[:, None] - places
    seen = (before >= 0) & (before <= (len(places) if window is None else window))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


# Part: recompute.


def recompute(rig: Rig) -> list[Line]:
    """With dropout, a recomputed forward draws the same again: gradients as without."""
    both = {"dropout": 0.1, "attention_dropout": 0.1}
    # Refused together: DeepSpeed's non-reentrant checkpoint knows no states of megatron's.
    hidden = {"dropout": 0.1}
    interval = {"activation_checkpoint_interval": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    expected = {
        len(rates): gradients_of(
            engine_of(rig, module_of(rig, PLAIN, **rates), sliced(rig, "1f1b")), rig
        )
        for rates in (both, hidden)
    }
    names = expected[1].keys()
    if all(torch.equal(expected[1][name], expected[2][name]) for name in names):
        raise RuntimeError("dropout of attention makes no difference")
    lines = []
    for name, schedule, rates, config, pipeline in (
        ("reentrant", "1f1b", both, {}, {**interval, "use_reentrant": True}),
        ("reentrant", "zb-h1", both, {}, {**interval, "use_reentrant": True}),
        ("not reentrant", "1f1b", hidden, {}, {**interval, "use_reentrant": False}),
        ("selective, core_attn", "1f1b", both, selective, {}),
    ):
        module = module_of(rig, PLAIN, **rates, **config)
        engine = engine_of(rig, module, sliced(rig, schedule), pipeline=pipeline)
        found = gradients_of(engine, rig)
        rates_named = "both dropouts 0.1" if rates is both else "hidden dropout 0.1"
        about = f"{name}, {schedule}, {rates_named}"
        lines.append(compared(about, found, expected[len(rates)], GRADIENT_LIMITS[torch.float32]))
    return lines


# Part: lifetime.


def lifetime(rig: Rig) -> list[Line]:
    """Nothing is freed or read too early, with transfers that run late and memory that is reused.

    After every instruction, memory of the sizes that are in use is claimed, filled with NaN, and
    freed: on a GPU the next claims get these blocks.
    """
    lines = []
    for schedule, streams in (("1f1b", False), ("zb-h1", False), ("1f1b", True)):
        block = sliced(rig, schedule)
        expected = gradients_of(engine_of(rig, module_of(rig, LLAMA), block), rig)
        with late_transfers() as groups:
            engine = engine_of(rig, module_of(rig, LLAMA), block)
        if not groups:
            raise RuntimeError("no transfer runs late")
        kept = keep_gradients(engine)
        _spoil_freed_memory(engine, rig)
        where = ", computed on a side stream" if streams else ""
        with _side_stream(rig) if streams else nullcontext():
            for _ in range(3):
                engine.train_batch(iter(batches(rig)))
        for step, found in enumerate(kept):
            name = f"{schedule}{where}, step {step}"
            lines.append(compared(name, found, expected, GRADIENT_LIMITS[torch.float32]))
    return lines


def _spoil_freed_memory(engine: Any, rig: Rig) -> None:
    size = rig.size
    heads = size.heads // 4
    width = size.hidden // size.heads
    boundary = [length * 2 * size.hidden for length in size.slices]
    context = [size.seq_length * 2 * heads * width, size.seq_length * 2 * size.hidden]
    claimed = [numbers * 4 for numbers in boundary + context]

    def spoiled(method: Any) -> Any:
        def run(self: Any, **kwargs: Any) -> None:
            method(self, **kwargs)
            # Three of each at a time; all bits set is NaN.
            blocks = [
                torch.empty(nbytes, dtype=torch.uint8, device=rig.device).fill_(255)
                for nbytes in claimed * 3
            ]
            del blocks

        return run

    engine._INSTRUCTION_MAP = {
        kind: spoiled(method) for kind, method in engine._INSTRUCTION_MAP.items()
    }


@contextmanager
def _side_stream(rig: Rig) -> Iterator[None]:
    """Inside, the current stream is not the default one; a CPU has but one."""
    if rig.device.type == "cpu":
        yield
        return
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        yield
    default.wait_stream(side)


# Part: memory.


def memory(rig: Rig) -> list[Line]:
    """Every step, and every evaluation, gives back what it has claimed."""
    # What may differ: less than any tensor that a slice holds.
    limit = min(rig.size.slices) * 2 * rig.size.hidden * 4 / 2
    lines = []
    for schedule in ("1f1b", "zb-h1"):
        engine = engine_of(rig, module_of(rig, LLAMA), sliced(rig, schedule))
        for name, run in (("training", engine.train_batch), ("evaluation", engine.eval_batch)):
            run(iter(batches(rig)))
            with _new_objects_only():
                levels = []
                for _ in range(5):
                    run(iter(batches(rig)))
                    levels.append(_bytes_in_use(rig))
                left = sum(type(thing) is LayerKV for thing in gc.get_objects())
            growth = max(levels) - min(levels)
            about = f"{schedule}, bytes in use after 5 steps of {name}, most less least"
            lines.append(measured(about, growth, limit))
            about = f"{schedule}, K and V buffers left after {name}"
            lines.append(measured(about, left, 0))
    return lines


@contextmanager
def _new_objects_only() -> Iterator[None]:
    """Inside, ``gc`` lists what was made inside, not the libraries' hundreds of thousands."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _bytes_in_use(rig: Rig) -> int:
    """Of the device's allocator; on a CPU of the tensors that Python has made lately."""
    gc.collect()
    if rig.device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


# Part: trace.


def trace(rig: Rig) -> list[Line]:
    """``"trace"`` takes its times from the device, and they fit the host's."""
    folder = rig.folder / "trace"
    block = {**sliced(rig, "zb-h1"), "trace": str(folder), "trace_steps": [1]}
    engine = engine_of(rig, module_of(rig, LLAMA), block)
    engine.train_batch(iter(batches(rig)))
    start = time.perf_counter()
    engine.train_batch(iter(batches(rig)))
    seconds = time.perf_counter() - start
    torch.distributed.barrier()
    shares = json.loads((folder / "step1-shares.json").read_text())["measured"]
    events = json.loads((folder / "step1.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    stop = max(event["ts"] + event["dur"] for event in spans)
    whole = (stop - min(event["ts"] for event in spans)) / 1e6
    computed = sum(event["cat"] in ("F", "B", "W") for event in spans)
    expected = 3 * rig.size.micro_batches * len(rig.size.slices) * STAGES
    sums = max(abs(sum(stage.values()) - 1) for stage in shares)
    least = min(min(stage.values()) for stage in shares)
    shortest = min(event["dur"] for event in spans) / 1e6
    return [
        measured("computed spans that are missing", abs(expected - computed), 0),
        measured("seconds by which a span ends before it starts", max(0.0, -shortest), 0),
        measured("seconds by which spans exceed the host's", max(0.0, whole - seconds), CLOCK_S),
        measured("shares of busy, waiting and idle, sum less one", sums, 1e-6),
        measured("shares of busy, waiting and idle, below zero", max(0.0, -least), 1e-6),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PARTS: dict[str, Callable[[Rig], list[Line]]] = {
    "gradients": gradients,
    "attention": attention_kernels,
    "recompute": recompute,
    "lifetime": lifetime,
    "memory": memory,
    "trace": trace,
}
