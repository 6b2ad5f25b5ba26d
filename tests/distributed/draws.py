"""Random settings, drawn whole, in which sliced training is compared with stock DeepSpeed's.

Each layout of parallel sizes is one launch; its ranks stay up between draws.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from . import cases

SEED = 20261201

# (pipeline, tensor, data) sizes and their share of the draws.
LAYOUTS = {(2, 1, 1): 6, (4, 1, 1): 4, (2, 2, 1): 5, (2, 1, 2): 3, (2, 2, 2): 2}

# What may be drawn. The first value of each is the plain one.
CHOICES: dict[str, list[Any]] = {
    "schedule": ["1f1b", "gpipe", "zb-h1"],
    "warmup": [0, 1, 3],
    "precision": ["exact", "bf16", "fp16"],
    "zero": [0, 1],
    "micro_batches": [1, 3],
    "positions": ["learned_absolute", "rope", "rope on every second layer", "none"],
    "style": ["gpt2", "llama"],
    "query_groups": [4, 2, 1],
    "attention": ["plain", "latent", "gate", "learnable", "off-by-one"],
    "qk_layernorm": [False, True],
    "window": [None, 5],
    "documents": [False, True],
    "experts": ["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "all"],
    "tied_head": [True, False],
    "recompute": [
        "none",
        "reentrant",
        "non-reentrant",
        "uniform",
        "block",
        "core_attn",
        "mlp",
        "layernorm",
        "mla_up_proj",
        "moe",
        "shared_experts",
    ],
    "dropout": [0.0, 0.1],
    "loss": ["auto", "whole_sequence"],
    "clipping": [0.0, 0.3],
    "prescale": [False, True],
    "sequence_parallel": [False, True],
}


@dataclass(frozen=True)
class Draw:
    """One whole setting."""

    pipe: int
    tensor: int
    data: int
    slices: Any
    schedule: str
    warmup: int
    precision: str
    zero: int
    micro_batches: int
    positions: str
    style: str
    query_groups: int
    attention: str
    qk_layernorm: bool
    window: int | None
    documents: bool
    experts: str
    tied_head: bool
    recompute: str
    dropout: float
    loss: str
    clipping: float
    prescale: bool
    sequence_parallel: bool

    @property
    def tolerance(self) -> float:
        """Of parameters after two steps, relative to the largest."""
        if self.precision != "exact":
            return 0.1
        return 1e-12 if self.is_fp64 else 2e-5

    @property
    def is_fp64(self) -> bool:
        """Whether nothing in this setting is fp32 inside."""
        # Vocab-parallel cross entropy is, and the probabilities of experts are.
        exact = self.tensor == 1 and self.zero == 0 and self.experts == "none"
        return self.precision == "exact" and exact

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def draws(count: int) -> dict[tuple[int, int, int], list[Draw]]:
    """So many settings, by layout; the same ones for the same count.

    Values that have been drawn least are likelier, so that few draws meet all of them.
    """
    chance = random.Random(SEED)
    seen: dict[tuple[str, Any], int] = {}
    made: dict[tuple[int, int, int], list[Draw]] = {}
    shares = sum(LAYOUTS.values())
    for layout, share in LAYOUTS.items():
        made[layout] = [_draw(chance, layout, seen) for _ in range(max(1, count * share // shares))]
    return made


def values(made: list[Draw]) -> set[tuple[str, Any]]:
    """All (name, value) that some settings have."""
    return {(name, getattr(draw, name)) for draw in made for name in CHOICES}


def _draw(
    chance: random.Random, layout: tuple[int, int, int], seen: dict[tuple[str, Any], int]
) -> Draw:
    pipe, tensor, data = layout
    chosen: dict[str, Any] = {}
    for name, options in CHOICES.items():
        weights = [1 / (1 + seen.get((name, option), 0)) ** 2 for option in options]
        chosen[name] = chance.choices(options, weights)[0]
    _make_possible(chosen, pipe, tensor)
    for name, value in chosen.items():
        seen[name, value] = seen.get((name, value), 0) + 1
    unit = tensor if chosen["sequence_parallel"] else 1
    one_group = chosen["loss"] == "whole_sequence" or chosen["experts"] in _OVER_MICRO_BATCH
    groups = 1 if one_group else chance.choice([1, 1, 2])
    cuts = [_cut(chance, unit) for _ in range(groups)]
    slices = cuts[0] if groups == 1 else [[1, cut] for cut in cuts]
    return Draw(pipe, tensor, data, slices, **chosen)


# These compare all sequences of a micro-batch, which then go together.
_OVER_MICRO_BATCH = ("aux_loss", "global_aux_loss", "all")


def _make_possible(chosen: dict[str, Any], pipe: int, tensor: int) -> None:
    """Changes what does not go together in DeepSpeed or megatron-core, slices or not."""
    recompute = chosen["recompute"]
    if chosen["schedule"] == "gpipe":
        chosen["warmup"] = 0
    if recompute == "mla_up_proj":
        chosen["attention"] = "latent"
    if recompute in ("moe", "shared_experts") and chosen["experts"] == "none":
        chosen["experts"] = "all"
    if recompute == "mlp":
        chosen["experts"], chosen["style"] = "none", "llama"
    has_experts = chosen["experts"] != "none"
    if tensor == 1:
        chosen["sequence_parallel"] = False
    elif has_experts:
        chosen["sequence_parallel"] = True
    if has_experts:
        # Experts have no biases.
        chosen["style"] = "llama"
    if chosen["attention"] == "latent":
        chosen["query_groups"], chosen["window"] = 4, None
    if chosen["query_groups"] % tensor:
        chosen["query_groups"] = tensor
    # DeepSpeed's non-reentrant checkpoint does not restore megatron's random states, and under it
    # megatron's global_aux_loss counts every micro-batch twice, in forward and in recomputation.
    counts_twice = chosen["experts"] in ("global_aux_loss", "all")
    if recompute == "non-reentrant" and (chosen["dropout"] or counts_twice):
        chosen["recompute"] = "reentrant"
    if chosen["precision"] == "fp16":
        chosen["zero"] = 1
    if chosen["precision"] == "exact" and chosen["zero"] and pipe == 4:
        # A stage of norm and head alone has nothing to share.
        chosen["zero"] = 0


def _cut(chance: random.Random, unit: int) -> list[int]:
    """A sequence in 1 to 6 slices of any length."""
    steps = cases.SEQ_LENGTH // unit
    stops = [*sorted(chance.sample(range(1, steps), chance.randint(0, 5))), steps]
    return [unit * (stop - start) for start, stop in zip([0, *stops], stops, strict=False)]
