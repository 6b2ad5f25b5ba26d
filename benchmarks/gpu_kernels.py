"""The attention kernels of a device, and how one is run: forward, backward, and who computed it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu_common import SEED, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.runtime import attention
from terapipe_ds.runtime.kv_context import ContextKV, SequenceContext, current_slice
from terapipe_ds.scheme import SliceScheme

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# What a kernel leaves in autograd's graph.
MARKS = {
    "FlashAttention": "flash",
    "EfficientAttention": "efficient",
    "CudnnAttention": "cudnn",
    "_Split": "split",
}

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ran:
    """A kernel's output, dQ, dK and dV, and which kernel torch took."""

    tensors: list[Tensor]
    kernel: str


class Refused(Exception):
    """torch does not run this kernel on these tensors; the message says why."""


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


def random_tensors(
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


def run_kernel(kernel: Kernel, qkv: list[Tensor], grad: Tensor) -> Ran:
    """Forward and backward of one call."""
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    output = kernel(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad)
    return Ran([output.detach(), *gradients], _taken(output))


def run_chain(lengths: Sequence[int], qkv: list[Tensor], grad: Tensor) -> Ran:
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


def attempt(work: Callable[[], Ran], device: torch.device) -> Ran:
    """Runs a kernel, and waits for it.

    Raises:
        Refused: if torch does not run it, with torch's reasons.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ran = work()
            synchronize(device)
        except RuntimeError as error:
            reasons = [str(error), *(str(warning.message) for warning in said)]
            lines = [reason.strip().split("\n")[0][:300] for reason in reasons]
            raise Refused(" | ".join(dict.fromkeys(lines))) from None
    return ran
