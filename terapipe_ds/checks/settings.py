"""The ``"terapipe"`` block, DeepSpeed's JSON, and whether the slices fit the sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import BLOCK, TeraPipeConfig, read_block
from ..errors import ConfigError
from ..runtime.refuse_settings import curriculum_refusal, has_sampled_curriculum, refused_json
from ..scheme import SliceScheme
from .findings import Finding, note, ok, refused

_MICRO_BATCH = "train_micro_batch_size_per_gpu"

_LOSS = {
    "auto": "loss as the model declares",
    "per_slice": "loss slice by slice",
    "whole_sequence": "loss of joined outputs",
}


def check_block(ds_config: Mapping[str, Any]) -> tuple[TeraPipeConfig | None, list[Finding]]:
    """The block where it is valid, and the findings."""
    try:
        block = read_block(dict(ds_config))
    except ConfigError as error:
        return None, [refused("block", str(error))]
    if block is None:
        return None, [
            refused(
                "block",
                f'{BLOCK}: found no "{BLOCK}" block, allowed is one; add "{BLOCK}": '
                '{"slices": "auto"}',
            )
        ]
    if not block.enabled:
        return block, [
            refused("block", f"{BLOCK}.enabled: found false, allowed is true; set it or drop it")
        ]
    return block, [ok("block", in_words(block))]


def in_words(block: TeraPipeConfig) -> str:
    """What a block asks for."""
    slices = block.slices
    if slices == "auto":
        cut = (
            f"slices measured and planned in the first step (at most {block.profile_budget_s:g} "
            f"s), multiples of {block.granularity} tokens"
        )
    elif isinstance(slices, int):
        cut = f"{slices} slices, as even as they go"
    elif isinstance(slices, SliceScheme):
        cut = f"groups of sequences {slices}"
    else:
        cut = f"{len(slices)} slices of {', '.join(map(str, slices))} tokens"
    trace = "" if block.trace is None else f"; steps {block.trace_steps} traced in {block.trace}"
    slack = "" if block.warmup == "auto" else f" with warmup {block.warmup}"
    return f"{cut}; schedule {block.schedule}{slack}; {_LOSS[block.loss]}{trace}"


def check_ds_config(ds_config: Mapping[str, Any]) -> list[Finding]:
    """What the engine refuses of DeepSpeed's own settings."""
    found = [refused("deepspeed JSON", line) for line in refused_json(ds_config)]
    if has_sampled_curriculum(ds_config):
        found.append(
            note("deepspeed JSON", "refused with several stages: " + curriculum_refusal("several"))
        )
    return found or [ok("deepspeed JSON", "nothing in it that slices cannot do")]


def check_fit(
    block: TeraPipeConfig,
    *,
    seq_length: int,
    multiple_of: int,
    sequences: int | None,
    at_most: int | None,
) -> list[Finding]:
    """Whether the block's slices fit sequences of a length.

    Args:
        block: the settings.
        seq_length: tokens of a sequence.
        multiple_of: what slice lengths have to be multiples of.
        sequences: of a micro-batch, where it is known.
        at_most: tokens that the model takes, where it is known.
    """
    if at_most is not None and seq_length > at_most:
        return [
            refused(
                "slices",
                f"--seq-length: found {seq_length} tokens for a model of {at_most}, allowed is at "
                "most that; change --seq-length or the model's seq_length",
            )
        ]
    if seq_length % multiple_of:
        return [
            refused(
                "slices",
                f"seq_length: found {seq_length} tokens, allowed are multiples of {multiple_of} "
                "(sequence parallelism shares them between ranks); change the sequence length",
            )
        ]
    slices = block.slices
    if slices == "auto":
        unit = math.lcm(block.granularity, multiple_of)
        return [ok("slices", f"{seq_length} tokens will be cut in multiples of {unit}")]
    if sequences is None:
        sequences = slices.sequences if isinstance(slices, SliceScheme) else 1
    try:
        scheme = SliceScheme.resolve(
            slices, sequences=sequences, seq_length=seq_length, multiple_of=multiple_of
        )
    except ConfigError as error:
        return [refused("slices", f"{BLOCK}.{error}")]
    return [ok("slices", f"{seq_length} tokens are cut into {scheme}")]


def sequences_of(ds_config: Mapping[str, Any]) -> int | None:
    """A micro-batch's sequences, where the JSON says so."""
    value = ds_config.get(_MICRO_BATCH)
    return value if type(value) is int and value >= 1 else None


__all__ = ["check_block", "check_ds_config", "check_fit", "in_words", "sequences_of"]
