"""Part 3 of ``gpu_profile.py``: what a layer costs, measured in slices and fitted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch
from gpu_common import Row, device_name, dtype_name, layer_dtype
from gpu_sizes import Layer, Size
from torch import Tensor, nn
from torch.nn import functional

from terapipe_ds.planner import CostModel, StageMemory, fit_stage
from terapipe_ds.planner.memory import optimizer_bytes
from terapipe_ds.runtime import attention
from terapipe_ds.runtime.profiler import (
    Measurements,
    StageUnderTest,
    chains,
    held_bytes,
    measure,
)


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


def profile(
    layer: Layer, size: Size, device: torch.device, deadline: float
) -> tuple[CostModel, int]:
    """Measures and fits one layer, one sequence at a time.

    Returns:
        Its costs, and how many rounds every chain has had.
    """
    dtype = layer_dtype(device)
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
        "dtype": dtype_name(dtype),
        "device": device_name(device),
        "torch": torch.__version__,
        "communication": "none",
    }
    fitted = fit_stage(layer.name, found.samples(), memory=memory)
    cost = CostModel(stages=(fitted,), seq_length=size.seq_length, about=about)
    return cost, min(len(rounds) for rounds in found.rounds)


def profile_row(cost: CostModel, rounds: int, path: Path) -> Row:
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


def print_fit(found: Row) -> None:
    about = found["about"]
    print(
        f"\nOne layer of {about['name']} (hidden {about['hidden']}, tensor parallel "
        f"{about['tensor_parallel']}, {about['dtype']}), at least {found['rounds']} rounds"
    )
    print(f"  {'length':>6}{'forward ms':>12}{'backward ms':>13}{'tokens/ms':>11}  without context")
    for point in without_context(found):
        speed = point["length"] / point["ms"]
        times = f"{point['forward_ms']:>12.3f}{point['backward_ms']:>13.3f}"
        print(f"  {point['length']:>6}{times}{speed:>11.1f}")
    errors = ", ".join(f"{form} {error:.1%}" for form, error in found["errors"].items())
    print(f"  median error on what the fit has not seen: {errors}; taken: {found['form']}")


def without_context(found: Row) -> list[Row]:
    """The first slices of all chains, by length; one for each length."""
    first = {point["length"]: point for point in found["points"] if point["context"] == 0}
    return [first[length] for length in sorted(first)]
