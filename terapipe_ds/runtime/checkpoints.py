"""Which of DeepSpeed's checkpoints an engine can load, asked before DeepSpeed begins to.

Read from DeepSpeed 0.19.8. Its pipeline checkpoints keep weights by layer and optimizer states by
rank, so another number of stages can read the weights alone; asked for more it fails on some ranks
with whatever does not fit first, or takes the first stage's optimizer for another one's. Universal
checkpoints keep both by parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import LAYER_FILE_PREFIX, MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX
from torch import nn

from ..errors import ConfigError

_CONVERT = (
    "convert it with deepspeed.checkpoint.ds_to_universal and set checkpoint.load_universal to true"
)


def check_loadable(
    engine: Any,
    load_dir: str,
    tag: Any,
    *,
    load_optimizer_states: bool,
    load_module_only: bool,
) -> None:
    """Raises if DeepSpeed would fail on a checkpoint, or load something else than asked for.

    Says nothing of a folder that is not there; DeepSpeed does.

    Args:
        engine: the ``PipelineEngine`` that is to load.
        load_dir: as in ``DeepSpeedEngine.load_checkpoint``, as all others.
        tag: the checkpoint's folder in ``load_dir``; the one in the file ``latest`` if None.
        load_optimizer_states: as given.
        load_module_only: as given.

    Raises:
        ConfigError: names the setting to change.
    """
    universal = engine.load_universal_checkpoint()
    weights_only = load_module_only or not load_optimizer_states
    if universal:
        _check_universal(engine, weights_only=weights_only)
    folder = _folder(load_dir, tag, "latest_universal" if universal else "latest")
    if folder is None:
        return
    if universal != (folder / "zero").is_dir():
        raise ConfigError(
            f"checkpoint.load_universal: found {str(universal).lower()} for the "
            f"{'plain' if universal else 'universal'} checkpoint {folder}, allowed is the other "
            f"value; change it, or {'convert the checkpoint' if universal else 'the tag'}"
        )
    if universal:
        _check_groups(engine, folder)
    else:
        _check_plain(engine, folder, weights_only=weights_only, load_module_only=load_module_only)


def _check_universal(engine: Any, *, weights_only: bool) -> None:
    if not engine.zero_optimization():
        raise ConfigError(
            "zero_optimization.stage: found 0 with checkpoint.load_universal, allowed is 1 (only "
            "ZeRO's optimizers read universal checkpoints); set zero_optimization.stage to 1"
        )
    if weights_only:
        raise ConfigError(
            "checkpoint.load_universal: found true for the weights alone, allowed is false "
            "(DeepSpeed 0.19.8 restores a universal checkpoint's optimizer states all the same); "
            "load the plain checkpoint it was made of, or pass neither load_module_only nor "
            "load_optimizer_states=False"
        )
    for name in _untrained(engine.module):
        raise ConfigError(
            f"checkpoint.load_universal: found true for a model with {name}, which is not trained, "
            "allowed is false (a pipeline's universal checkpoint holds trained parameters alone); "
            "load a plain checkpoint"
        )


def _check_groups(engine: Any, folder: Path) -> None:
    """A stage takes the settings of its optimizer's groups from the first stage's, by position."""
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)
    saved, here = len(state["param_groups"]), len(engine.optimizer.param_groups)
    if saved != here:
        raise ConfigError(
            f"optimizer: found {here} parameter groups on a stage and {saved} in the universal "
            f"checkpoint {folder}, allowed is the same number (DeepSpeed drops groups that are "
            "empty on a stage, and would mix up the others); change num_stages or the groups"
        )


def _untrained(module: nn.Module) -> Iterator[str]:
    """What a plain checkpoint of a module holds besides trained parameters."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield name
    saved = module.state_dict()
    yield from (name for name, _ in module.named_buffers() if name in saved)


def _check_plain(engine: Any, folder: Path, *, weights_only: bool, load_module_only: bool) -> None:
    stages, ranks = _saved_shape(folder)
    grid = engine.grid
    if ranks != grid.get_slice_parallel_world_size():
        raise ConfigError(
            f"load_checkpoint: found a checkpoint of {ranks} tensor-parallel ranks for a model on "
            f"{grid.get_slice_parallel_world_size()}, allowed is the same number; {_CONVERT}"
        )
    if stages != engine.num_stages and not weights_only:
        raise ConfigError(
            f"load_checkpoint: found a checkpoint of {stages} stages for a model of "
            f"{engine.num_stages}, allowed is the same number (each stage has its own layers' "
            f"optimizer states); {_CONVERT}, or pass load_module_only=True for the weights alone"
        )
    if engine.bfloat16_enabled() and not engine.zero_optimization() and not load_module_only:
        raise ConfigError(
            "zero_optimization.stage: found 0 with bf16, allowed is 1 to load a checkpoint "
            "(DeepSpeed 0.19.8 cannot read these optimizer states, and without them goes on from "
            "the fp32 weights it had); set zero_optimization.stage to 1, which reads the same "
            "files, or pass load_module_only=True"
        )


def _folder(load_dir: str, tag: Any, latest: str) -> Path | None:
    """The checkpoint's own folder; None where there is none."""
    if tag is None:
        file = Path(load_dir) / latest
        if not file.is_file():
            return None
        tag = file.read_text().strip()
    folder = Path(load_dir) / str(tag)
    return folder if any(folder.glob(f"{MODEL_FILE_PREFIX}*")) else None


def _saved_shape(folder: Path) -> tuple[int, int]:
    """Stages and tensor-parallel ranks of the run that saved a checkpoint.

    By its files' names, since one file holds the whole state of an optimizer.
    """
    files = len(list(folder.glob(f"{MODEL_FILE_PREFIX}*{MODEL_FILE_SUFFIX}")))
    # layer_00-model_01-model_states.pt: one of each layer for each tensor-parallel rank.
    layers = folder.glob(f"{LAYER_FILE_PREFIX}*-model_states.pt")
    copies = Counter(path.name.split("-")[0] for path in layers)
    ranks = max(copies.values(), default=1)
    return files // ranks, ranks
