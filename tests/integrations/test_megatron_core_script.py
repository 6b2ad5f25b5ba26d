"""An unedited script under the launcher; what the options and the environment do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from terapipe_ds import integrations
from terapipe_ds.config import read_block
from terapipe_ds.errors import ConfigError, TeraPipeError
from terapipe_ds.integrations import install, megatron_core
from terapipe_ds.integrations.megatron_core import take_option
from tests.distributed.ranks import free_port, run_ranks

from . import megatron_lm_workers as workers

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "standin" / "pretrain_megatron.py"
OPTIONS = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.distributed
def test_unedited_under_the_launcher(tmp_path: Path) -> None:
    config = tmp_path / "slices.json"
    config.write_text('{"slices": [7, 4, 13], "timeout_s": 60}')
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *(f"--master_port={free_port()}", "-m", "terapipe_ds.run", str(SCRIPT)),
            *OPTIONS,
            *("--terapipe-config", str(config)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert launched.returncode == 0, launched.stdout + launched.stderr
    printed = re.search(r"^results: (.*)$", launched.stdout, re.MULTILINE)
    assert printed is not None, launched.stdout
    sliced = json.loads(printed[1])
    stock = run_ranks(workers.script, 2, tmp_path / "stock", OPTIONS)[1].value
    assert sliced["losses"] == pytest.approx(stock["losses"], rel=1e-12)
    assert sliced["evaluation"] == pytest.approx(stock["evaluation"], rel=1e-12)
    assert len(set(sliced["losses"])) == 3
    assert sliced["schedule"] == "SlicedSchedule"
    assert stock["schedule"] == "forward_backward_pipelining_without_interleaving"
    assert not sliced["has deepspeed"]


@pytest.mark.parametrize(
    ("argv", "value", "left"),
    [
        (["--lr", "1"], None, ["--lr", "1"]),
        (["--terapipe-config", "a.json", "--lr", "1"], "a.json", ["--lr", "1"]),
        (["--lr", "1", "--terapipe-config=a.json"], "a.json", ["--lr", "1"]),
        (["--terapipe-config=a", "x", "--terapipe-config", "b", "y"], "b", ["x", "y"]),
    ],
)
def test_the_option_is_taken_out(argv: list[str], value: str | None, left: list[str]) -> None:
    assert take_option(argv) == value
    assert argv == left


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for megatron's module, and its package, which the script has imported already."""
    found, package = ModuleType(megatron_core._SCHEDULES), ModuleType(megatron_core._PACKAGE)
    found.get_forward_backward_func = package.get_forward_backward_func = lambda: "stock"
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    # Not DeepSpeed's, which other tests of this process use.
    monkeypatch.setattr(integrations, "_INTEGRATIONS", ("megatron_core",))
    return found


def is_sliced(module: Any) -> bool:
    return hasattr(module.get_forward_backward_func, megatron_core._STOCK)


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_rebound(
    by: str,
    enabled: bool,
    schedules: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"slices": 4, "enabled": enabled}))
    argv = ["--x"]
    if by == "option":
        argv += ["--terapipe-config", str(path)]
        monkeypatch.setenv("TERAPIPE_CONFIG", "is not read")
    else:
        monkeypatch.setenv("TERAPIPE_CONFIG", str(path))
    assert ("megatron_core" in install(argv)) == enabled
    assert argv == ["--x"]
    assert is_sliced(schedules) == enabled
    assert is_sliced(sys.modules[megatron_core._PACKAGE]) == enabled


def test_nothing_changes_without_a_configuration(
    schedules: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERAPIPE_CONFIG", raising=False)
    assert not megatron_core.install(["--x"])
    assert not is_sliced(schedules)


def test_switched_off_the_option_is_taken_out(
    schedules: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAPIPE", "0")
    monkeypatch.setattr(sys, "argv", ["script.py", "--terapipe-config", "is not read", "--x"])
    assert install() == []
    assert sys.argv == ["script.py", "--x"]
    assert not is_sliced(schedules)


def test_rebinding_twice_changes_nothing(schedules: ModuleType) -> None:
    block = read_block({"terapipe": {"slices": 2}})
    assert block is not None
    megatron_core.rebind(schedules, block=block)
    first = schedules.get_forward_backward_func
    megatron_core.rebind(schedules, block=block)
    assert schedules.get_forward_backward_func is first


def test_a_block_that_is_off_gives_megatrons_own(schedules: ModuleType) -> None:
    off = {"slices": 2, "enabled": False}
    assert megatron_core.forward_backward_func(off) == "stock"
    block = read_block({"terapipe": {"slices": 2}})
    assert block is not None
    megatron_core.rebind(schedules, block=block)
    assert megatron_core.forward_backward_func(off) == "stock"


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", r"^--terapipe-config: found '.*', which cannot be read \(.*\), allowed is a JSON"),
        ("{}", r'^terapipe.slices: found "auto", allowed are a number of slices'),
        ('{"slices": 0}', r"^terapipe.slices: found 0, allowed are"),
        ('{"slice": 4}', r"^terapipe.slice: found an unknown key"),
        ('{"slices": 4, "loss": "per_slice"}', r'^terapipe.loss: found "per_slice", allowed are'),
        ('{"slices": 4, "trace": "x"}', r"^terapipe.trace: found 'x', allowed is none"),
        ("[]", r"^terapipe: found \[\], allowed is a JSON object"),
    ],
)
def test_wrong_settings_are_one_line(content: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=pattern) as caught:
        megatron_core.install(["--terapipe-config", str(path)])
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--terapipe-config: found 'none\.json', which cannot"):
        megatron_core.install(["--terapipe-config=none.json"])
    with pytest.raises(ConfigError, match=r"^--terapipe-config: found no file after it"):
        megatron_core.install(["--terapipe-config"])


def test_the_same_settings_give_the_same_schedule() -> None:
    block = {"slices": 3}
    one = megatron_core.forward_backward_func(block)
    assert megatron_core.forward_backward_func(dict(block)) is one
    assert megatron_core.forward_backward_func({"slices": 4}) is not one


def test_installed_megatron_has_every_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.integrations import megatron_seams

    megatron_seams.check_seams()
    with monkeypatch.context() as patch:
        patch.setattr(megatron_seams, "ARGUMENTS", megatron_seams.ARGUMENTS[1:])
        with pytest.raises(TeraPipeError, match=r"differ in the argument forward_step_func"):
            megatron_seams.check_seams()
    for name in megatron_seams.SCHEDULE_SEAMS:
        with monkeypatch.context() as patch:
            patch.delattr(megatron_seams.schedules, name)
            with pytest.raises(TeraPipeError, match=rf"differ in {name}, allowed is 0\.15\.3 to"):
                megatron_seams.check_seams()
