"""``terapipe profile``: times the stages of a GPT from its shape alone, one kind after another.

One process is enough (or one for each tensor-parallel rank, under the launcher): it builds the
layers of one stage, with the embedding and the head, and times them as a first, a middle and a last
stage. ``"slices": "auto"`` needs none of this: it times the stages where they are.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tqdm import tqdm

from .. import __version__
from ..errors import ConfigError
from ..files import write_text
from ..planner.cost import KINDS, CostModel, StageCost, Transfer
from ..planner.fit import fit_stage
from ..planner.memory import StageMemory, optimizer_bytes
from ..runtime.adapter import Tensors, adapter_of
from ..runtime.loss import MicroBatchLoss
from ..runtime.profiler import Chain, Measurements, StageUnderTest, chains, held_bytes, measure
from ..runtime.transfers import time_transfers
from ..scheme import SliceScheme, TokenRange
from .gpt import batch, gpt_pipeline, split_backward
from .preset import ModelPreset

_SEED = 1234


def profile_model(
    preset: ModelPreset,
    *,
    stages: int,
    sequences: int,
    granularity: int,
    budget_s: float,
    partial_path: Path,
    transfer: Transfer | None = None,
) -> CostModel:
    """Times the stages of a model.

    Args:
        preset: the model.
        stages: pipeline stages that it will have; each gets as many layers.
        sequences: sequences of a micro-batch.
        granularity: the shortest slice worth knowing, in tokens.
        budget_s: seconds to spend.
        partial_path: where rounds are kept; an interrupted profile goes on there. The caller
            deletes it when the result is safe.
        transfer: times of messages, where they are known; measured between two processes of this
            machine if None.

    Raises:
        ConfigError: if the model cannot be cut into so many stages, or ``partial_path`` belongs to
            another model.
    """
    preset.check_profile(stages=stages, granularity=granularity)
    _initialize()
    layers = -(-preset.num_layers // stages)
    module = gpt_pipeline(
        preset.transformer_config(
            num_layers=layers, tensor_model_parallel_size=dist.get_world_size()
        ),
        vocab_size=preset.vocab_size,
        seq_length=preset.seq_length,
        topology=PipeModelDataParallelTopology(1, dist.get_world_size(), 1),
        position_embedding_type=preset.position_embedding_type,
        tied_head=preset.tied_head,
        activation_checkpoint_interval=preset.activation_checkpoint_interval,
        seed=_SEED,
    )
    split_backward(module)
    about = _about(preset, layers=layers, stages=stages)
    kinds = _kinds(module, layers, stages)
    timed = chains(
        preset.seq_length,
        sequences=sorted({sequences, 1}, reverse=True),
        granularity=granularity,
    )
    kept = _Partial(partial_path, about, timed)
    costs = []
    with tqdm(total=len(kinds), unit="stage", desc="profile", disable=dist.get_rank() > 0) as bar:
        for kind, part in kinds.items():
            stage = _stage_under_test(preset, module, part)
            costs.append(_measure(kind, stage, kept, bar, budget_s / len(kinds), sequences))
            bar.update()
    if transfer is None:
        element = torch.empty((), dtype=getattr(torch, preset.dtype)).element_size()
        transfer = time_transfers(
            bytes_per_token=preset.hidden_size * element, most_tokens=sequences * preset.seq_length
        )
    return CostModel(tuple(costs), preset.seq_length, transfer, about)


def is_first_rank() -> bool:
    """Whether this process, of those that profile together, writes the files."""
    return bool(dist.get_rank() == 0)


def _initialize() -> None:
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    deepspeed.init_distributed(verbose=False)


def _about(preset: ModelPreset, *, layers: int, stages: int) -> dict[str, Any]:
    accelerator = get_accelerator()
    cpu = accelerator.device_name() == "cpu"
    return {
        "device": platform.processor() or platform.machine() if cpu else _gpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {
            "terapipe_ds": __version__,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        },
        "shape": preset.shape(),
        "layers_per_stage": layers,
        "stages": stages,
        "tensor_parallel": dist.get_world_size(),
    }


def _gpu_name() -> str:
    return torch.cuda.get_device_name()


class _Part(NamedTuple):
    """The layers of one kind of stage."""

    functions: list[Any]
    embeds: bool
    has_loss: bool


def _kinds(module: Any, layers: int, stages: int) -> dict[str, _Part]:
    """What stages of each kind that the pipeline has consist of."""
    functions = list(module.forward_funcs)
    if stages == 1:
        return {"stage 0": _Part(functions, True, True)}
    first = _Part(functions[: layers + 1], True, False)
    middle = _Part(functions[1 : layers + 1], False, False)
    last = _Part(functions[1:], False, True)
    if stages == 2:
        return {"stage 0": first, "stage 1": last}
    return dict(zip(KINDS, (first, middle, last), strict=True))


def _stage_under_test(preset: ModelPreset, module: Any, part: _Part) -> StageUnderTest:
    device = torch.device(get_accelerator().current_device_name())
    adapter = adapter_of(module)
    generator = torch.Generator().manual_seed(_SEED)

    def text(sequences: int, tokens: int) -> Any:
        drawn = torch.randint(0, preset.vocab_size, (2, sequences, tokens), generator=generator)
        return batch(*drawn.to(device))

    def make_inputs(sequences: int, tokens: TokenRange) -> Tensors:
        if part.embeds:
            inputs, _ = text(sequences, tokens.stop)
            return adapter.cut(inputs, adapter.inputs, slice(0, sequences), tokens.as_slice)
        shape = (tokens.length, sequences, preset.hidden_size)
        hidden = torch.randn(shape, dtype=getattr(torch, preset.dtype), device=device)
        return hidden.requires_grad_()

    def make_loss(scheme: SliceScheme) -> MicroBatchLoss:
        _, labels = text(scheme.sequences, scheme.seq_length)
        return MicroBatchLoss(
            module.loss_fn,
            adapter,
            labels,
            scheme,
            mode="per_slice",
            keep_outputs=False,
            additional_losses=module.get_additional_losses,
        )

    def run(inputs: Tensors) -> Any:
        # PipelineModule's own forward, which knows what is recomputed, over this stage's layers.
        module.forward_funcs = part.functions
        return module(inputs)

    # A tied head is no module: it is a function of the embedding, which counts as its weights.
    layers = [f if isinstance(f, torch.nn.Module) else module.tied_modules for f in part.functions]
    parameters = {id(p): p for layer in layers for p in layer.parameters()}
    return StageUnderTest(
        run=run,
        inputs=make_inputs,
        parameters=list(parameters.values()),
        device=device,
        loss=make_loss if part.has_loss else None,
        # So one cost file serves all schedules.
        splits_backward=True,
    )


def _measure(
    kind: str,
    stage: StageUnderTest,
    kept: _Partial,
    bar: Any,
    budget_s: float,
    sequences: int,
) -> StageCost:
    found = kept.of(kind)

    def after_chain(found: Measurements) -> None:
        kept.save()
        rounds = [len(rounds) for rounds in found.rounds]
        bar.set_postfix_str(f"{kind}, round {max(rounds)}, {sum(map(bool, rounds))} cuts timed")

    measure(
        stage,
        found,
        budget_s=budget_s,
        any_rank=partial(_any_rank, stage.device),
        after_chain=after_chain,
    )
    tokens = found.chains[0].lengths[0]
    held = held_bytes(stage, sequences=sequences, tokens=min(256, max(1, tokens // 2)))
    size = sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters)
    return fit_stage(
        kind,
        found.samples(),
        memory=StageMemory(
            parameters=size,
            gradients=size,
            optimizer=optimizer_bytes(
                sum(parameter.numel() for parameter in stage.parameters),
                half=any(parameter.element_size() < 4 for parameter in stage.parameters),
            ),
            activation_per_token=held.activations,
            kv_per_token=held.kv,
        ),
    )


def _any_rank(device: torch.device, mine: bool) -> bool:
    if dist.get_world_size() == 1:
        return mine
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class _Partial:
    """Rounds on disk, so that an interrupted profile goes on where it was."""

    def __init__(self, path: Path, about: dict[str, Any], timed: list[Chain]) -> None:
        self._path = path
        self._key = {"about": about, "chains": [list(map(_plain, chain)) for chain in timed]}
        self._found: dict[str, Measurements] = {}
        self._timed = timed
        self._before: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text())
            found = content["key"]
        except (KeyError, TypeError, ValueError):
            found = None
        if found != self._key:
            raise ConfigError(
                f"profile: found {path} of another model or other settings, allowed is to go on "
                "with the same; delete it, or change --out"
            )
        self._before = content["rounds"]

    def of(self, kind: str) -> Measurements:
        """The rounds of one kind of stage, those of an earlier run included."""
        rounds = [
            [[(forward, backward, weight) for forward, backward, weight in times] for times in each]
            for each in self._before.get(kind, [])
        ]
        self._found[kind] = Measurements(self._timed, rounds)
        return self._found[kind]

    def save(self) -> None:
        if dist.get_rank() == 0:
            rounds = {kind: found.rounds for kind, found in self._found.items()}
            content = {"key": self._key, "rounds": {**self._before, **rounds}}
            write_text(self._path, json.dumps(content))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


__all__ = ["is_first_rank", "profile_model"]
