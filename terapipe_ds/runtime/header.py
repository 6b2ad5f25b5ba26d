"""One exchange a step: what every stage must know before the first slice.

The first and the last stage load the step's micro-batches before it begins, so that all ranks know
their shapes, and that they are all there, before any of them computes. Lengths may therefore change
from step to step, and a data iterator that ends early is the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, DataIteratorEnded, TeraPipeError
from .agreement import error_of

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
    pipeline: Pipeline,
    shapes: Sequence[BatchShape] | None,
    micro_batches: int,
    *,
    check: Callable[[list[BatchShape]], Any],
    unknown: Callable[[list[BatchShape]], bool] = lambda shapes: False,
) -> tuple[list[BatchShape], bool]:
    """Makes every stage know the shapes of the step's micro-batches.

    Whatever is wrong with them anywhere, all ranks of all pipelines raise together, so that a
    script may catch the error on all of them and go on.

    Args:
        pipeline: the ranks.
        shapes: what this rank has loaded; None on stages that load nothing.
        micro_batches: how many micro-batches the step needs.
        check: raises a :class:`TeraPipeError` if the shapes cannot be cut as configured.
        unknown: whether something has to be done about these shapes by all ranks together.

    Returns:
        The shapes, and whether they are unknown on any rank of any pipeline.

    Raises:
        DataIteratorEnded: if the first or the last stage of any pipeline loaded too few.
        TeraPipeError: if both loaded different shapes, or as ``check`` does.
    """
    headers = _gather(pipeline, _encode(shapes, micro_batches))
    loaded = [int(header[0]) for header in headers]
    first, last = _decode(headers[0]), _decode(headers[-1])
    error, news = None, False
    if min(loaded) == micro_batches:
        error = error_of(lambda: _check(first, last, check))
        news = unknown(first)
    fewest, errors, news = _over_world(pipeline, min(loaded), error is not None, news)
    if fewest < micro_batches:
        raise DataIteratorEnded(_ended(loaded, fewest, micro_batches))
    if error is not None:
        raise error
    if errors:
        raise ConfigError(
            "data: found micro-batches on another data-parallel rank that cannot be cut as "
            "terapipe.slices says; that rank's output names them"
        )
    return first, news


def _check(
    first: list[BatchShape], last: list[BatchShape], check: Callable[[list[BatchShape]], None]
) -> None:
    for position, (here, there) in enumerate(zip(first, last, strict=True)):
        if here != there:
            raise TeraPipeError(
                f"data: found micro-batch {position} of (sequences, tokens) {here} on the first "
                f"stage and {there} on the last, allowed is the same on both; give both stages the "
                "same data iterator"
            )
    check(first)


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


def _over_world(
    pipeline: Pipeline, fewest: int, has_error: bool, news: bool
) -> tuple[int, bool, bool]:
    """The fewest micro-batches that any pipeline has loaded; whether any has an error, or news."""
    if not pipeline.spans_world:
        return fewest, has_error, news
    state = [fewest, -int(has_error), -int(news)]
    shared = torch.tensor(state, dtype=torch.int64, device=pipeline.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    fewest, error, unknown = shared.tolist()
    return fewest, error < 0, unknown < 0


def _ended(loaded: Sequence[int], fewest: int, micro_batches: int) -> str:
    stage = loaded.index(fewest) if fewest in loaded else None
    where = f"on stage {stage}" if stage is not None else "on another data-parallel rank"
    return (
        f"data: found an iterator that ended after {fewest} of {micro_batches} micro-batches "
        f"{where}, allowed is gradient_accumulation_steps micro-batches a step; give a longer "
        "iterator (deepspeed.utils.RepeatingLoader) or lower gradient_accumulation_steps"
    )
