"""What ranks run in the tests of checkpoints that are loaded by other numbers of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state
from torch.nn import functional

import terapipe_ds

from .behaviour import small_gpt
from .workers import batches, engine_of, initialize_distributed

ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {**ZERO1, "bf16": {"enabled": True}}
GPT2: dict[str, Any] = {}
"""With a tied head, learned positions and biases."""

LLAMA = {
    "tied_head": False,
    "position_embedding_type": "rope",
    "config": {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
    },
}
"""With a head of its own, rotary positions, a gated MLP and grouped queries."""

SETTINGS = {"tied": (GPT2, ZERO1), "untied": (LLAMA, ZERO1), "bf16": (GPT2, BF16)}

BLOCK = {"slices": [10, 30, 8], "timeout_s": 60}
MICRO_BATCHES = 4
STEPS = 2
"""Before a checkpoint; three more follow it."""


def engine_for(
    build: dict[str, Any], extra: dict[str, Any], *, tensor: int = 1, replicas: int = 1
) -> Any:
    """A sliced engine on all ranks, with AdamW; the rest of the ranks are its stages."""
    stages = torch.distributed.get_world_size() // (tensor * replicas)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas)
    config = {"tensor_model_parallel_size": tensor, **build.get("config", {})}
    return engine_of(
        small_gpt(**{**build, "topology": topology, "config": config}),
        MICRO_BATCHES // replicas,
        BLOCK,
        # A smaller eps amplifies rounding where a gradient is truly 0.
        lambda chosen: torch.optim.AdamW(chosen, lr=0.01, eps=1e-3),
        **extra,
    )


def losses(engine: Any, steps: range) -> list[float]:
    """Those of some steps of the run; replicas share each step's micro-batches."""
    found = []
    for step in steps:
        made = batches(MICRO_BATCHES, seed=step)
        replica = engine.grid.get_data_parallel_rank()
        mine = made[replica * engine.micro_batches : (replica + 1) * engine.micro_batches]
        found.append(engine.train_batch(iter(mine)).item())
    return found


def later(engine: Any) -> list[float]:
    """The losses of the three steps after a checkpoint."""
    return losses(engine, range(STEPS, STEPS + 3))


def convert(folder: str) -> None:
    """The command that users type, on one rank."""
    tag = f"{folder}/global_step{STEPS}"
    command = f"ds_to_universal.py --input_folder {tag} --output_folder {tag}_universal"
    # Ranks of tests may not start processes of their own.
    command += " --num_extract_workers 1 --num_merge_workers 1"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        with mock.patch.object(sys, "argv", command.split()):
            ds_to_universal.main(ds_to_universal.parse_arguments())
    torch.distributed.barrier()


def save(folder: str) -> dict[str, list[float]]:
    """Saves runs of all settings after two steps; the losses of the next three of each."""
    initialize_distributed()
    found = {}
    for name, (build, extra) in SETTINGS.items():
        engine = engine_for(build, extra)
        losses(engine, range(STEPS))
        engine.save_checkpoint(f"{folder}/{name}")
        convert(f"{folder}/{name}")
        found[name] = later(engine)
    # What follows the weights alone, with a new optimizer.
    engine = engine_for(*SETTINGS["tied"])
    engine.load_checkpoint(f"{folder}/tied", load_module_only=True)
    found["weights alone"] = later(engine)
    return found


def resume(
    folder: str, names: Iterable[str], *, again: str | None = None, **shape: int
) -> dict[str, list[float]]:
    """The losses of the next three steps from universal checkpoints.

    ``again`` is a folder in which what was loaded is saved and converted once more.
    """
    # An earlier model of this process had another topology.
    parallel_state.destroy_model_parallel()
    found = {}
    for name in names:
        build, extra = SETTINGS[name]
        engine = engine_for(build, {**extra, "checkpoint": {"load_universal": True}}, **shape)
        path, _ = engine.load_checkpoint(f"{folder}/{name}")
        assert path is not None, "the checkpoint was not found"
        assert engine.global_steps == STEPS
        if again is not None:
            engine.save_checkpoint(f"{again}/{name}")
            convert(f"{again}/{name}")
        found[name] = later(engine)
    return found


def resume_on_four(folder: str, again: str) -> dict[str, dict[str, list[float]]]:
    """On 4 stages, 2 stages of 2 replicas, and 2 stages of 2 tensor-parallel ranks."""
    initialize_distributed()
    fp32 = ("tied", "untied")
    return {
        "4 stages": resume(folder, SETTINGS),
        "2 replicas": resume(folder, ["tied"], replicas=2),
        "2 tensor-parallel ranks": resume(folder, fp32, tensor=2, again=again),
    }


def resume_on_one(folder: str, again: str) -> dict[str, dict[str, list[float]]]:
    """On 1 stage, from 2 stages, and from 2 stages of 2 tensor-parallel ranks."""
    initialize_distributed()
    return {"2 ranks": resume(folder, SETTINGS), "4 ranks": resume(again, ("tied", "untied"))}


def plain(folder: str, again: str) -> tuple[dict[str, str], list[list[float]]]:
    """Plain checkpoints of other numbers of ranks: refused, but for weights on other stages."""
    initialize_distributed()
    refused, found = {}, []
    for wanted in ({"load_module_only": True}, {"load_optimizer_states": False}):
        engine = engine_for(*SETTINGS["tied"])
        refused["stages"] = refusal(engine, f"{folder}/tied")
        refused["ranks"] = refusal(engine, f"{again}/tied", **wanted)
        engine.load_checkpoint(f"{folder}/tied", **wanted)
        assert engine.global_steps == (0 if "load_module_only" in wanted else STEPS)
        found.append(later(engine))
    return refused, found


def refusal(engine: Any, folder: str, **wanted: bool) -> str:
    """What an engine says of a checkpoint that it does not load."""
    try:
        engine.load_checkpoint(folder, **wanted)
    except terapipe_ds.ConfigError as error:
        return str(error)
    raise AssertionError(f"{folder} was loaded")


def bf16_without_zero(folder: str) -> str:
    """Saved without ZeRO, refused without it, and whole with ZeRO-1; what the refusal says."""
    initialize_distributed()
    without, name = {"bf16": {"enabled": True}}, f"{folder}/bf16 without zero"
    engine = engine_for(GPT2, without)
    losses(engine, range(STEPS))
    engine.save_checkpoint(name)
    expected = later(engine)
    engine = engine_for(GPT2, BF16)
    engine.load_checkpoint(name)
    assert later(engine) == expected
    refusal(engine_for(GPT2, without), name, load_optimizer_states=False)
    return refusal(engine_for(GPT2, without), name)
