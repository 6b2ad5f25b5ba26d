"""What of Megatron-DeepSpeed's options cannot be sliced, and what to change instead.

Needs neither torch nor DeepSpeed: ``terapipe doctor`` asks here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import number_of, value_of

OFF = 'or set "terapipe": {"enabled": false}, or TERAPIPE=0'

# Arguments of megatron that slices cannot keep to: name, the option to drop, and why.
REFUSED = (
    ("use_flash_attn_v1", "--use-flash-attn-v1", "its causal mask ends in the wrong corner"),
    ("use_flash_attn_v2", "--use-flash-attn-v2", "its path wants as many queries as keys"),
    ("use_flash_attn_triton", "--use-flash-attn-triton", "it wants as many queries as keys"),
    ("use_flash_attn_builder", "--use-flash-attn-builder", "it wants as many queries as keys"),
    ("use_flash_attn", "--use-flash-attn", "its path wants as many queries as keys"),
    (
        "use_rotary_position_embeddings",
        "--use-rotary-position-embeddings",
        "its table is kept by length alone, so every slice would get the first positions",
    ),
    ("reset_attention_mask", "--reset-attention-mask", "stages share one constant mask"),
    ("sequence_parallel", "--sequence-parallel", "it shares positions out by the whole sequence"),
    ("force_ds_sequence_parallel", "--force-ds-sequence-parallel", "it cuts sequences itself"),
    ("ds_sequence_parallel_fpdt", "--ds-sequence-parallel-fpdt", "it cuts sequences itself"),
    ("retro_add_retriever", "--retro-add-retriever", "it attends across the ends of slices"),
    ("random_ltd", "--random-ltd", "it drops tokens within a slice"),
    ("num_experts_switch", "--num-experts-switch", "experts are not supported yet"),
    (
        "curriculum_learning_legacy",
        "curriculum_learning in the DeepSpeed JSON",
        "the mask would not fit the sequences",
    ),
    (
        "data_efficiency_curriculum_learning",
        "--data-efficiency-curriculum-learning",
        "the mask would not fit the sequences",
    ),
)

# Those that have a number, of which 1 is right.
REFUSED_ABOVE_ONE = (
    ("num_experts", "--num-experts", "experts are not supported yet"),
    ("ds_sequence_parallel_size", "--ds-sequence-parallel-size", "it cuts sequences itself"),
)

SPLIT_BACKWARD = (
    'terapipe.schedule: found "zb-h1", allowed are "1f1b" and "gpipe" for this model (its linear '
    "layers cannot put their weight gradients off); change terapipe.schedule"
)

_NO_PIPELINE = "--no-pipeline-parallel"


def refusal(option: str, found: object, reason: str) -> str:
    """Why an option cannot be kept."""
    return (
        f"{option}: found {found!r}, allowed is none with token slices ({reason}); drop {option}, "
        f"{OFF}"
    )


def refused_options(argv: Sequence[str], ds_config: Mapping[str, Any]) -> list[str]:
    """Options of a script like Megatron-DeepSpeed's that are refused, a line for each.

    Args:
        argv: the script's arguments.
        ds_config: its DeepSpeed JSON, from which the script takes one of them.
    """
    refused = [
        refusal(option, value_of(option, argv) if name == "num_experts_switch" else True, reason)
        for name, option, reason in REFUSED
        if any(argument.partition("=")[0] == option for argument in argv)
    ]
    curriculum = ds_config.get("curriculum_learning")
    if isinstance(curriculum, Mapping) and curriculum.get("enabled") is True:
        refused += [
            refusal(option, True, reason)
            for name, option, reason in REFUSED
            if name == "curriculum_learning_legacy"
        ]
    for _, option, reason in REFUSED_ABOVE_ONE:
        number = number_of(option, argv)
        if number is not None and number > 1:
            refused.append(refusal(option, number, reason))
    if _NO_PIPELINE in argv:
        refused.append(refusal(_NO_PIPELINE, True, "without stages there is nothing to fill"))
    return refused


__all__ = [
    "OFF",
    "REFUSED",
    "REFUSED_ABOVE_ONE",
    "SPLIT_BACKWARD",
    "refusal",
    "refused_options",
]
