"""What ranks run in the distributed tests."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import OptimizerStep
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

import terapipe_ds
from terapipe_ds.models import megatron_core
from terapipe_ds.models.gpt import batch, gpt_pipeline
from terapipe_ds.runtime import attention, engine, launch  # noqa: F401 - imported once, by the server
from tests.conftest import SEED

from . import cases
from .cases import Case

Gradients = dict[str, Tensor]


def initialize_distributed() -> None:
    deepspeed.init_distributed("gloo")


def mean_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over valid tokens that keeps the logits' dtype; megatron's is fp32 inside."""
    targets, mask = labels
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.transpose(0, 1).flatten(), reduction="none"
    )
    weights = mask.transpose(0, 1).flatten().to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def config_of(case: Case) -> TransformerConfig:
    llama = case.style == "llama"
    return TransformerConfig(
        num_layers=cases.LAYERS,
        hidden_size=cases.HIDDEN,
        num_attention_heads=4,
        num_query_groups=2 if case.grouped_queries else 4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=functional.silu if llama else functional.gelu,
        add_bias_linear=not llama,
        params_dtype=getattr(torch, case.dtype),
    )


def module_of(case: Case, stages: int) -> Any:
    return gpt_pipeline(
        config_of(case),
        vocab_size=cases.VOCAB,
        seq_length=cases.SEQ_LENGTH,
        num_stages=stages,
        position_embedding_type=case.positions,
        tied_head=case.tied_head,
        loss_fn=mean_loss if case.dtype == "float64" else None,
        loss_is_token_mean=True,
        seed=SEED,
    )


def batches(
    count: int,
    *,
    sequences: int = cases.SEQUENCES,
    length: int = cases.SEQ_LENGTH,
    seed: int = SEED,
) -> list[Any]:
    """Random micro-batches, with a few valid tokens, many, or none, in their slices."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens = torch.randint(0, cases.VOCAB, (sequences, length + 1), generator=generator)
        mask = (torch.rand(sequences, length, generator=generator) < 0.7).float()
        mask[0, : length // 6] = 0
        mask[:, -length // 5 :] = 0
        made.append(batch(tokens[:, :-1], tokens[:, 1:], mask))
    return made


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    # A smaller eps amplifies rounding where a gradient is truly 0.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def block_of(case: Case) -> dict[str, Any]:
    return {
        "slices": cases.UNEVEN[case.slices],
        "schedule": case.schedule,
        "warmup": case.warmup,
        "loss": "whole_sequence" if case.whole_sequence else "auto",
        "timeout_s": 60,
    }


def ds_config(micro_batches: int, block: Any = None, **extra: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": cases.SEQUENCES,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        # DeepSpeed 0.19.8 clips to 1.0 unless told not to.
        "gradient_clipping": 0.0,
        **extra,
    }
    return config if block is None else {**config, "terapipe": block}


def engine_of(
    module: Any,
    micro_batches: int,
    block: Any = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **extra: Any,
) -> Any:
    # DeepSpeed needs an optimizer on each stage, and an optimizer needs parameters.
    every = list(module.parameters())
    parameters = [parameter for parameter in every if parameter.requires_grad] or every
    make_optimizer = make_optimizer or (lambda chosen: torch.optim.SGD(chosen, lr=0.05))
    optimizer = make_optimizer(parameters) if parameters else None
    return terapipe_ds.initialize(
        model=module, config=ds_config(micro_batches, block, **extra), optimizer=optimizer
    )[0]


def keep_gradients(ds_engine: Any) -> list[Gradients]:
    """Collects the gradients of each step, reduced, just before the optimizer uses them."""
    kept: list[Gradients] = []
    step = type(ds_engine)._INSTRUCTION_MAP[OptimizerStep]

    def keep_and_step(self: Any, **kwargs: Any) -> None:
        kept.append(
            {
                name: parameter.grad.clone()
                for name, parameter in self.module.named_parameters()
                if parameter.grad is not None
            }
        )
        step(self, **kwargs)

    ds_engine._INSTRUCTION_MAP = {**type(ds_engine)._INSTRUCTION_MAP, OptimizerStep: keep_and_step}
    return kept


def difference(found: Tensor, reference: Tensor) -> float:
    """max|difference| / max|reference|."""
    scale = reference.abs().max().item()
    gap = (found - reference).abs().max().item()
    relative = gap / scale if scale else gap
    return relative if math.isfinite(relative) else math.inf


def worst(found: Gradients, reference: Gradients) -> tuple[float, str]:
    """The largest relative difference, and the parameter that has it."""
    return max((difference(tensor, reference[name]), name) for name, tensor in found.items())


@dataclasses.dataclass
class Reference:
    """What the unsliced single-process run gives."""

    losses: list[float]
    gradients: Gradients
    parameters: Gradients


def reference_runs(listed: list[Case]) -> dict[str, Reference]:
    """Plain torch on one process: no DeepSpeed engine, no slices, attention by plain math."""
    initialize_distributed()
    megatron_core.causal_attention = plainly
    return {case.name: _reference(case) for case in listed}


def plainly(
    _: Any, *tensors: Tensor, scale: float | None, dropout_p: float, **sight: Any
) -> Tensor:
    """``causal_attention`` by plain math, for sequences that are not cut."""
    return attention.plain_math(
        *tensors, attention.Sight(**sight), scale=scale, dropout_p=dropout_p
    )


def _reference(case: Case) -> Reference:
    module = module_of(case, stages=1)
    optimizer = optimizer_of(case, module.parameters())
    data = iter(batches(3 * case.micro_batches))
    losses, gradients = [], {}
    for step in range(3):
        total = 0.0
        for _ in range(case.micro_batches):
            inputs, labels = next(data)
            loss = module.loss_fn(module(inputs), labels) / case.micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            gradients = {
                name: parameter.grad.clone() for name, parameter in module.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return Reference(losses, gradients, parameters)


@dataclasses.dataclass
class Comparison:
    """The largest relative differences of a sliced run from the reference, on one rank."""

    loss: float
    gradient: tuple[float, str]
    parameter: tuple[float, str]
    names: set[str]
    """The parameters of this rank whose gradients were compared."""


def sliced_runs(
    listed: list[Case], references_path: Path, broken: str | None = None
) -> dict[str, Comparison]:
    """The same steps in token slices, compared on each rank with what ``reference_runs`` gave."""
    initialize_distributed()
    references = pickle.loads(references_path.read_bytes())
    if broken == "dkv":
        _drop_context_gradients()
    # DeepSpeed's reduction of gradients knows no float64 on CPU, though it would run as it is.
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float64]
    return {case.name: _compare(case, references[case.name]) for case in listed}


def _compare(case: Case, reference: Reference) -> Comparison:
    module = module_of(case, case.stages)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    ds_engine = engine_of(
        module, case.micro_batches, block_of(case), lambda chosen: optimizer_of(case, chosen)
    )
    # Without this, DeepSpeed reduces float64 gradients in float32, even over one rank.
    ds_engine.communication_data_type = getattr(torch, case.dtype)
    kept = keep_gradients(ds_engine)
    data = iter(batches(3 * case.micro_batches))
    loss_gap = 0.0
    for expected in reference.losses:
        ds_engine.train_batch(data)
        if ds_engine.is_last_stage():
            # train_batch returns fp32; the sum on the last stage keeps the dtype.
            found = ds_engine.total_loss.item() / case.micro_batches
            loss_gap = max(loss_gap, abs(found - expected) / abs(expected))
    assert set(kept[0]) == trained, f"no gradient for {trained - set(kept[0])}"
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return Comparison(
        loss_gap,
        worst(kept[0], reference.gradients),
        worst(parameters, reference.parameters),
        set(kept[0]),
    )


def _drop_context_gradients() -> None:
    """The fault that must be seen: the dK and dV of later slices never reach earlier tokens."""
    from terapipe_ds.runtime.kv_context import LayerKV

    LayerKV.exchange_gradients = lambda *_, **__: [None, None]


def endless(made: list[Any]) -> Iterator[Any]:
    while True:
        yield from made
