"""One exchange a step: what every stage must know before the first slice.

The first and the last stage load the step's micro-batches before it begins, so that all ranks know
their shapes, and that they are all there, before any of them computes. Lengths may therefore change
from step to step, and a data iterator that ends early is the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor

from ..errors import DataIteratorEnded, TeraPipeError

BatchShape = tuple[int, int]
"""(sequences, tokens)."""


class Pipeline(NamedTuple):
    """The ranks that a step's header goes through.

    Attributes:
        group: the process group of this pipeline's stages, first to last.
        stages: their number.
        spans_world: whether there are other pipelines (data or tensor parallel).
        device: where messages live.
    """

    group: Any
    stages: int
    spans_world: bool
    device: torch.device


def exchange_shapes(
    pipeline: Pipeline, shapes: Sequence[BatchShape] | None, micro_batches: int
) -> list[BatchShape]:
    """Makes every stage know the shapes of the step's micro-batches.

    Args:
        pipeline: the ranks.
        shapes: what this rank has loaded; None on stages that load nothing.
        micro_batches: how many micro-batches the step needs.

    Raises:
        DataIteratorEnded: on every rank, if the first or the last stage of any pipeline loaded too
            few.
        TeraPipeError: on every rank of the pipeline, if both loaded different shapes.
    """
    headers = _gather(pipeline, _encode(shapes, micro_batches))
    loaded = [int(header[0]) for header in headers]
    _all_loaded(pipeline, loaded, micro_batches)
    first, last = _decode(headers[0]), _decode(headers[-1])
    if first != last:
        pairs = zip(first, last, strict=True)
        position = next(index for index, (here, there) in enumerate(pairs) if here != there)
        raise TeraPipeError(
            f"data: found micro-batch {position} of (sequences, tokens) {first[position]} on the "
            f"first stage and {last[position]} on the last, allowed is the same on both; give both "
            "stages the same data iterator"
        )
    return first


def _encode(shapes: Sequence[BatchShape] | None, micro_batches: int) -> Tensor:
    header = torch.zeros(1 + 2 * micro_batches, dtype=torch.int64)
    if shapes is None:
        header[0] = micro_batches
        return header
    header[0] = len(shapes)
    header[1 : 1 + 2 * len(shapes)] = torch.tensor(list(shapes), dtype=torch.int64).flatten()
    return header


def _decode(header: Tensor) -> list[BatchShape]:
    return [(int(sequences), int(tokens)) for sequences, tokens in header[1:].view(-1, 2).tolist()]


def _gather(pipeline: Pipeline, header: Tensor) -> list[Tensor]:
    if pipeline.stages == 1:
        return [header]
    mine = header.to(pipeline.device)
    headers = [torch.empty_like(mine) for _ in range(pipeline.stages)]
    dist.all_gather(headers, mine, group=pipeline.group)
    return [gathered.cpu() for gathered in headers]


def _all_loaded(pipeline: Pipeline, loaded: Sequence[int], micro_batches: int) -> None:
    fewest = min(loaded)
    if pipeline.spans_world:
        # Another replica of the model may have run out of data; all ranks must stop together.
        fewest_anywhere = torch.tensor(fewest, dtype=torch.int64, device=pipeline.device)
        dist.all_reduce(fewest_anywhere, op=dist.ReduceOp.MIN)
        fewest = int(fewest_anywhere)
    if fewest < micro_batches:
        stage = loaded.index(fewest) if fewest in loaded else None
        where = f"on stage {stage}" if stage is not None else "on another data-parallel rank"
        raise DataIteratorEnded(
            f"data: found an iterator that ended after {fewest} of {micro_batches} micro-batches "
            f"{where}, allowed is gradient_accumulation_steps micro-batches a step; give a longer "
            "iterator (deepspeed.utils.RepeatingLoader) or lower gradient_accumulation_steps"
        )
