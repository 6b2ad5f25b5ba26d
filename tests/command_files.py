"""Files for the command's tests: a cost file, its plan, its model and a DeepSpeed JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from terapipe_ds.planner import CostModel, Plan, StageMemory, Transfer, plan

from .planner.costs import model, stage

GIB = 2**30
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "seq_length": 64,
}
SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_query_groups": None,
    "ffn_hidden_size": None,
    "dtype": "float32",
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "tied_head": True,
    "activation_checkpoint_interval": 0,
}
DS_CONFIG = (
    '{\n  "train_batch_size": 8,\n  "optimizer": {"type": "Adam", "params": {"lr": 1E-4}}\n}\n'
)


def two_stages() -> CostModel:
    """The second is slower; an activation takes 2 MiB a token, so a plan can need too much."""
    memory = StageMemory(GIB / 2, GIB / 2, GIB, activation_per_token=2**21, kv_per_token=2**18)
    stages = [stage(f"stage {k}", slow=1 + k / 2, memory=memory) for k in (0, 1)]
    transfer = Transfer(latency_ms=0.1, ms_per_byte=1e-6, bytes_per_token=64)
    cost = model(*stages, seq_length=64, transfer=transfer)
    return dataclasses.replace(cost, about={"device": "cpu", "shape": SHAPE})


def made(cost: CostModel, **options: Any) -> Plan:
    """The plan of the package, with the command's defaults."""
    return plan(cost, **{"seq_length": 64, "objective": "simulate", "sequences": 1, **options})


def write_files(folder: Path) -> None:
    cost = two_stages()
    cost.save(folder / "cost.json")
    made(cost, stages=2, sequences=2).save(folder / "plan.json")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "ds.json").write_text(DS_CONFIG)
