"""What ranks run in the tests of split backwards and of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

import terapipe_ds
from terapipe_ds.runtime import weight_grads
from terapipe_ds.runtime.attention import causal_attention

from .behaviour import assert_same, assert_same_gradients, small_gpt
from .workers import batches, engine_of, initialize_distributed, keep_gradients

SLICES = [9, 30, 9]


def gpt_as_fused(build: dict[str, Any], extra: dict[str, Any], tensor: int = 1) -> None:
    """``zb-h1`` gives the gradients of ``1f1b``: the same products, summed in another order."""
    initialize_distributed()
    if tensor > 1:
        pipe = torch.distributed.get_world_size() // tensor
        build = {**build, "topology": PipeModelDataParallelTopology(pipe, tensor, 1)}
        build["config"] = {"tensor_model_parallel_size": tensor}
    _same(lambda: small_gpt(**build), lambda: batches(2), extra)


def shared_linear_as_fused() -> None:
    """Plain ``torch.nn.Linear`` layers, one of them used twice, its output cut in three."""
    initialize_distributed()
    torch.manual_seed(1)
    data = [(torch.randn(2, 48, 16), torch.randn(2, 48, 16)) for _ in range(2)]
    _same(_plain_pipeline, lambda: data, {})


def computed_weights() -> None:
    """A weight that is no leaf keeps its whole backward; other layers are split beside it."""
    initialize_distributed()
    torch.manual_seed(1)
    data = [(torch.randn(2, 48, 16), torch.randn(2, 48, 16)) for _ in range(2)]
    _same(lambda: _plain_pipeline(NormedBlock), lambda: data, {})


def low_rank_adapters() -> None:
    """Frozen layers with small trained ones beside them: as under stock DeepSpeed, split or not."""
    initialize_distributed()
    torch.manual_seed(1)
    data = [(torch.randn(2, 48, 16), torch.randn(2, 48, 16)) for _ in range(2)]
    found = []
    for block in (None, {"slices": SLICES}, {"slices": SLICES, "schedule": "zb-h1"}):
        engine = engine_of(_plain_pipeline(AdaptedBlock), 2, block)
        kept = keep_gradients(engine)
        losses = [engine.train_batch(iter(data)).item() for _ in range(2)]
        assert set(kept[0]) == {
            name for name, p in engine.module.named_parameters() if p.requires_grad
        }
        found.append((losses, kept))
    (expected_losses, expected), *others = found
    for losses, kept in others:
        assert_same(losses, expected_losses, "loss")
        for mine, theirs in zip(kept, expected, strict=True):
            assert_same_gradients(mine, theirs)


def _same(build: Any, data: Any, extra: dict[str, Any]) -> None:
    tolerance = 1e-2 if "bf16" in extra else 1e-5
    owed = count_owed()
    found = []
    for schedule in ("1f1b", "zb-h1"):
        block = {"slices": SLICES, "schedule": schedule, "timeout_s": 60}
        engine = engine_of(build(), 2, block, **extra)
        kept = keep_gradients(engine)
        assert not owed
        losses = [engine.train_batch(iter(data())).item() for _ in range(2)]
        parameters = [parameter.detach() for parameter in engine.module.parameters()]
        found.append((losses, kept, parameters))
        if schedule == "zb-h1":
            assert owed, "nothing was put off"
            assert engine._step is None
    (expected_losses, expected, expected_parameters), (losses, kept, parameters) = found
    assert_same(losses, expected_losses, "loss", tolerance)
    for mine, theirs in zip(kept, expected, strict=True):
        assert set(mine) == set(theirs)
        # DeepSpeed's 16-bit optimizers take gradients away as they come: parameters must do there.
        if theirs and "bf16" not in extra:
            assert_same_gradients(mine, theirs, tolerance)
    assert_same(parameters, expected_parameters, "parameter", tolerance)


def count_owed() -> list[Any]:
    """A list that grows with every weight gradient that is put off."""
    owed: list[Any] = []
    original = weight_grads.owe

    def counted(work: Any) -> bool:
        if original(work):
            owed.append(work)
            return True
        return False

    weight_grads.owe = counted
    return owed


class Block(nn.Module):
    """Attention whose fused projection is cut in three, and a linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.twice = nn.Linear(16, 16, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[b, l, 16]`` to the same."""
        length_first = hidden.transpose(0, 1)
        query, key, value = (
            part.unflatten(-1, (2, 8)) for part in self.qkv(length_first).chunk(3, dim=-1)
        )
        attended = causal_attention(self, query, key, value).flatten(2).transpose(0, 1)
        return hidden + self.twice(torch.tanh(self.twice(attended)))


class NormedBlock(Block):
    """A layer whose weight is computed anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.utils.parametrizations.weight_norm(self.qkv)


class AdaptedBlock(Block):
    """A frozen block with low-rank adapters around it."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[b, l, 16]`` to the same."""
        return super().forward(hidden) + self.up(self.down(hidden))


def _plain_pipeline(layer: type[nn.Module] = Block) -> PipelineModule:
    module = PipelineModule(
        [LayerSpec(layer) for _ in range(4)],
        num_stages=torch.distributed.get_world_size(),
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        seed_layers=True,
    )
    token = terapipe_ds.TensorDims(batch=0, sequence=1)
    module.token_slice_adapter = terapipe_ds.SequenceAdapter(
        inputs=(token,),
        labels=(token,),
        boundary=(token,),
        output=token,
        mean_over_valid_tokens=True,
    )
    return module


def traced(folder: Path, block: dict[str, Any]) -> list[str]:
    """Chosen steps leave a trace, a picture and shares, and nothing else changes."""
    initialize_distributed()
    block = {**block, "timeout_s": 60, "trace": str(folder), "trace_steps": [1, 3]}
    engine = engine_of(small_gpt(), 2, block)
    plain = engine_of(small_gpt(), 2, {**block, "trace_steps": []})
    for step in range(4):
        data = batches(2, seed=step)
        assert engine.train_batch(iter(data)).item() == plain.train_batch(iter(data)).item()
    torch.distributed.barrier()
    names = sorted(path.name for path in folder.iterdir())
    for step in (1, 3):
        shares = json.loads((folder / f"step{step}-shares.json").read_text())
        for kind in ("measured", "planned"):
            assert len(shares[kind]) == engine.num_stages
            for stage in shares[kind]:
                assert abs(sum(stage.values()) - 1) < 1e-6, stage
                assert min(stage.values()) > -1e-6, stage
        events = json.loads((folder / f"step{step}.json").read_text())["traceEvents"]
        spans = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0]
        computed = [name for name in spans if name[:2] in ("F0", "B0", "W0", "F1", "B1", "W1")]
        kinds = 3 if block["schedule"] == "zb-h1" else 2
        assert len(computed) == kinds * 2 * len(SLICES) * engine.num_stages, computed
        assert any(name.startswith("RecvActivationSlice") for name in spans)
    return names
