"""Part 1 of ``gpu_profile.py``: is every attention kernel right, beside plain math in fp64?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from gpu_common import Row, dtype_name
from gpu_kernels import Ran, Refused, attempt, kernels, random_tensors, run_chain, run_kernel
from gpu_sizes import Size
from torch import Tensor

from terapipe_ds.runtime import attention

# Sequences of the correctness checks: more than one, so that mixing them up would show.
CHECKED_SEQUENCES = 2
# The largest error that is right, relative to the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# What must run wherever it is tried; the backends by name may be refused.
REQUIRED = ("sdpa", "split", "causal_attention")
COMPARED = ("output", "dQ", "dK", "dV")


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
    *qkv, grad = random_tensors(
        length, context, heads, width, dtype, device, sequences=CHECKED_SEQUENCES
    )
    expected = _expected(qkv, grad)
    about = _about(dtype, heads, width) | {"length": length, "context": context}
    return [
        _judged({"kernel": name} | about, partial(run_kernel, kernel, qkv, grad), expected)
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
    *qkv, grad = random_tensors(
        sum(lengths), 0, heads, width, dtype, device, sequences=CHECKED_SEQUENCES
    )
    about = {"kernel": "causal_attention"} | _about(dtype, heads, width)
    about["lengths"] = list(lengths)
    return [_judged(about, partial(run_chain, lengths, qkv, grad), _expected(qkv, grad))]


def _expected(qkv: list[Tensor], grad: Tensor) -> list[Tensor]:
    exact = [tensor.double() for tensor in qkv]
    return run_kernel(attention.plain_math, exact, grad.double()).tensors


def _judged(about: Row, work: Callable[[], Ran], expected: list[Tensor]) -> Row:
    """One row: what a kernel gave, how far that is from the truth, and whether it is right."""
    try:
        ran = attempt(work, expected[0].device)
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
    return {"dtype": dtype_name(dtype), "heads": list(heads), "width": width}


def print_kernels(found: Row) -> None:
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
