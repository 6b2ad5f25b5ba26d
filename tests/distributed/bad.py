"""What ranks run in the tests of bad input and of failing ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from terapipe_ds.models.megatron_core import token_slice_layer_spec
from terapipe_ds.schedule.instructions import ForwardSlice

from . import toy
from .behaviour import small_gpt
from .workers import batches, endless, engine_of, initialize_distributed


def bad_input(kind: str) -> None:
    """Each must raise on every rank; uncaught here, so that the exit code is seen too."""
    initialize_distributed()
    rank = torch.distributed.get_rank()
    stages = torch.distributed.get_world_size()
    block: Any = {"slices": [9, 30, 9], "timeout_s": 20}
    extra: dict[str, Any] = {}
    build: Any = small_gpt
    data: Iterator[Any] = endless(batches(2))
    if kind == "sum":
        block["slices"] = [9, 30, 10]
    elif kind == "shorter":
        data = endless(batches(2, length=40))
    elif kind == "count":
        block["slices"] = 49
    elif kind == "groups":
        block["slices"] = [[3, [48]]]
    elif kind == "blocks":
        block["slices"] = [9, 30, 9] if rank == 0 else [30, 9, 9]
    elif kind == "one rank without":
        block["enabled"] = rank == 0
    elif kind == "one rank has no block":
        block = block if rank == 0 else None
    elif kind == "one rank wrong":
        block.update({"slice": 4} if rank == 1 else {})
    elif kind == "mask":

        def build() -> Any:
            config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4)
            spec = token_slice_layer_spec(config, attn_mask_type=AttnMaskType.no_mask)
            return small_gpt(layer_spec=spec)

    elif kind == "window":

        def build() -> Any:
            return small_gpt(config={"window_size": (8, 1)})

    elif kind == "trace":
        block["trace"] = "/proc/nope"
    elif kind == "zero2":
        extra["zero_optimization"] = {"stage": 2}
    elif kind == "attention dropout without reentrant":
        extra["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}

        def build() -> Any:
            return small_gpt(attention_dropout=0.1)

    elif kind == "ends early":
        data = iter(batches(3))
    elif kind == "ends early on the last stage":
        data = iter(batches(3)) if rank == stages - 1 else data
    elif kind == "other lengths on the last stage":
        data = endless(batches(2, length=40)) if rank == stages - 1 else data
    elif kind == "no adapter":

        def build() -> Any:
            return toy.toy_pipeline(stages, adapter=False)

    elif kind == "tied attention on one stage":
        block["slices"] = 3

        def build() -> Any:
            return toy.toy_pipeline(stages)

        data = endless(toy.toy_batches(2))
    elif kind == "per_slice of another loss":
        block["loss"] = "per_slice"

        def build() -> Any:
            return toy.toy_pipeline(stages, mean=False)

    elif kind == "whole sequence of groups":
        block.update(slices=[[1, [48]], [1, [40, 8]]], loss="whole_sequence")
    elif kind == "groups that balance":
        block.update(slices=[[1, [48]], [1, [40, 8]]])

        def build() -> Any:
            experts = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1, "add_bias_linear": False}
            return small_gpt(config=experts)

    elif kind == "stages":

        def build() -> Any:
            return PipelineModule([LayerSpec(torch.nn.Linear, 2, 2)], num_stages=stages)

    elif kind == "not a pipeline":

        def build() -> Any:
            return torch.nn.Linear(2, 2)

    engine = engine_of(build(), 2, block, **extra)
    if kind == "compile":
        engine.compile()
    for step in range(3):
        if kind == "frozen between steps" and step == 1:
            engine.module.requires_grad_(False)
        engine.train_batch(data)


def fails(how: str, timeout_s: float, broke_at: Path) -> None:
    """One middle rank is killed, gets stuck, or raises, in its second step.

    It leaves the machine's clock of that moment in the file ``broke_at``.
    """
    initialize_distributed()
    engine = engine_of(small_gpt(), 2, {"slices": 4, "timeout_s": timeout_s})
    data = endless(batches(2))
    engine.train_batch(data)
    forward = type(engine)._INSTRUCTION_MAP[ForwardSlice]

    def break_down(self: Any, micro_batch: int, slice: int) -> None:
        if (micro_batch, slice) == (1, 2):
            broke_at.write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck":
                time.sleep(1000)
            raise ValueError("something broke")
        forward(self, micro_batch=micro_batch, slice=slice)

    if engine.stage_id == 1:
        engine._INSTRUCTION_MAP = {**type(engine)._INSTRUCTION_MAP, ForwardSlice: break_down}
    engine.train_batch(data)
