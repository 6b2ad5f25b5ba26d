"""The shapes that ``gpu_profile.py`` runs on: all of them, and the few of ``--small``."""

from __future__ import annotations

from dataclasses import dataclass


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
