"""Checkpoints that an engine cannot load, by what is in their folders and how it is asked."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from terapipe_ds.errors import ConfigError
from terapipe_ds.runtime.checkpoints import check_loadable


def engine(
    module: nn.Module | None = None,
    *,
    stages: int = 2,
    ranks: int = 1,
    universal: bool = False,
    zero: bool = True,
    bf16: bool = False,
    groups: int = 2,
) -> Any:
    """What the check asks of an engine."""
    return SimpleNamespace(
        module=module or nn.Linear(1, 1),
        num_stages=stages,
        grid=SimpleNamespace(get_slice_parallel_world_size=lambda: ranks),
        load_universal_checkpoint=lambda: universal,
        zero_optimization=lambda: zero,
        bfloat16_enabled=lambda: bf16,
        optimizer=SimpleNamespace(param_groups=[{}] * groups),
    )


def saved(folder: Path, *, stages: int = 2, ranks: int = 1, universal: bool = False) -> str:
    """The files of a checkpoint with the tag ``step``, most of them empty."""
    step = folder / "step"
    step.mkdir()
    for rank in range(stages * ranks):
        (step / f"mp_rank_{rank:02d}_model_states.pt").touch()
    for layer in range(0 if universal else 5):
        for rank in range(ranks):
            model = f"-model_{rank:02d}" if ranks > 1 else ""
            (step / f"layer_{layer:02d}{model}-model_states.pt").touch()
    if universal:
        (step / "zero").mkdir()
        torch.save({"param_groups": [{}, {}]}, step / "zero" / "optimizer_state.pt")
    (folder / ("latest_universal" if universal else "latest")).write_text("step")
    return str(folder)


def check(made: Any, folder: str, tag: str | None = None, **wanted: bool) -> None:
    wanted = {"load_optimizer_states": True, "load_module_only": False, **wanted}
    check_loadable(made, folder, tag, **wanted)


WEIGHTS = ({"load_module_only": True}, {"load_optimizer_states": False})


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_the_same_shape_passes(shape: tuple[int, int], tmp_path: Path) -> None:
    stages, ranks = shape
    folder = saved(tmp_path, stages=stages, ranks=ranks)
    for tag in (None, "step"):
        check(engine(stages=stages, ranks=ranks), folder, tag)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (2, 4), (4, 2)])
def test_other_stages_read_weights_alone(before: int, now: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, stages=before, ranks=2)
    for wanted in WEIGHTS:
        check(engine(stages=now, ranks=2), folder, **wanted)
    message = f"found a checkpoint of {before} stages for a model of {now}, .*load_module_only=True"
    with pytest.raises(ConfigError, match=message):
        check(engine(stages=now, ranks=2), folder)


@pytest.mark.parametrize("wanted", [{}, *WEIGHTS])
def test_other_tensor_parallel_ranks_are_refused(wanted: Any, tmp_path: Path) -> None:
    """As many files, as 2 stages of 2 ranks and as 4 stages."""
    folder = saved(tmp_path, stages=2, ranks=2)
    with pytest.raises(ConfigError, match=r"of 2 tensor-parallel ranks for a model on 1, .*conv"):
        check(engine(stages=4), folder, **wanted)


def test_bf16_without_zero_reads_all_of_the_weights_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    made = engine(bf16=True, zero=False)
    check(engine(bf16=True), folder)
    check(engine(zero=False), folder)
    check(made, folder, load_module_only=True)
    for wanted in ({}, {"load_optimizer_states": False}):
        with pytest.raises(ConfigError, match=r"^zero_optimization\.stage: found 0 with bf16"):
            check(made, folder, **wanted)


@pytest.mark.parametrize("universal", [True, False])
def test_the_kind_must_be_the_settings(universal: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, universal=universal)
    check(engine(universal=universal), folder)
    kind = "false for the universal" if universal else "true for the plain"
    with pytest.raises(ConfigError, match=rf"load_universal: found {kind} checkpoint .*step"):
        check(engine(universal=not universal), folder, "step")


def test_universal_checkpoints_fit_any_stages(tmp_path: Path) -> None:
    folder = saved(tmp_path, stages=4, universal=True)
    check(engine(stages=1, universal=True), folder)


def test_a_stage_needs_the_optimizer_groups_that_were_saved(tmp_path: Path) -> None:
    folder = saved(tmp_path, universal=True)
    with pytest.raises(ConfigError, match=r"^optimizer: found 1 parameter groups on a stage and"):
        check(engine(universal=True, groups=1), folder)


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[1].bias.requires_grad_(False)
    return module


def with_buffer(*, persistent: bool) -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_buffer("table", torch.zeros(1), persistent=persistent)
    return module


@pytest.mark.parametrize(
    ("made", "wanted", "message"),
    [
        (engine(universal=True, zero=False), {}, r"^zero_optimization\.stage: found 0 with .*"),
        *(
            (engine(universal=True), wanted, r"load_universal: found true for the weights alone")
            for wanted in WEIGHTS
        ),
        (engine(frozen(), universal=True), {}, r"a model with 1\.bias, which is not trained"),
        (
            engine(with_buffer(persistent=True), universal=True),
            {},
            r"a model with table, which is not trained",
        ),
    ],
)
def test_what_universal_checkpoints_leave_out_is_refused(
    made: Any, wanted: Any, message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, universal=True)
    with pytest.raises(ConfigError) as caught:
        check(made, folder, **wanted)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_universal_checkpoints_need_no_table_that_is_not_saved(tmp_path: Path) -> None:
    folder = saved(tmp_path, universal=True)
    check(engine(with_buffer(persistent=False), universal=True), folder)


@pytest.mark.parametrize("universal", [True, False])
def test_a_missing_checkpoint_is_left_to_deepspeed(universal: bool, tmp_path: Path) -> None:
    for tag in (None, "step"):
        check(engine(universal=universal), str(tmp_path), tag)
