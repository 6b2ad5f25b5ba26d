"""Where a block may be, DeepSpeed is prepared; where there is none for sure, nothing is touched."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import deepspeed
import pytest

import terapipe_ds
from terapipe_ds import integrations
from terapipe_ds.errors import ConfigError
from terapipe_ds.integrations import deepspeed_script, install
from terapipe_ds.runtime.deepspeed_seams import STOCK, stock_initialize


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sliced.json").write_text('{"terapipe": {"slices": 4}}')
    (tmp_path / "stock.json").write_text("{}")
    (tmp_path / "commented.json").write_text('{"terapipe": {}} // hjson')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deepspeed, "initialize", stock_initialize())


@pytest.mark.parametrize(
    ("arguments", "rebound"),
    [
        (["--deepspeed_config", "sliced.json"], True),
        (["--lr", "1", "--deepspeed_config=sliced.json"], True),
        (["--deepspeed_config", "stock.json", "--deepspeed_config", "sliced.json"], True),
        # There may be a block in what the script makes itself, or in JSON with comments.
        ([], True),
        (["--deepspeed_config"], True),
        (["--deepspeed_config", "commented.json"], True),
        (["--deepspeed_config", "stock.json"], False),
        (["--deepspeed_config", "sliced.json", "--deepspeed_config=stock.json"], False),
    ],
)
def test_what_is_rebound(arguments: list[str], rebound: bool) -> None:
    assert install(arguments) == ["deepspeed_script"] * rebound
    assert hasattr(deepspeed.initialize, STOCK) == rebound


@pytest.mark.parametrize(("value", "rebound"), [("0", False), ("1", True)])
def test_the_environment_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, value: str, rebound: bool
) -> None:
    monkeypatch.setenv("TERAPIPE", value)
    install(["--deepspeed_config", "sliced.json"])
    assert hasattr(deepspeed.initialize, STOCK) == rebound


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAPIPE", "off")
    with pytest.raises(ConfigError, match=r"^TERAPIPE: found 'off', allowed are 0 \(off\) and 1"):
        install([])


def test_the_process_own_arguments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--deepspeed_config", "stock.json"])
    assert install() == []


def test_an_integration_may_take_its_options_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taker = ModuleType("terapipe_ds.integrations.taker")
    taker.install = lambda argv: argv.remove("--mine") is None
    monkeypatch.setitem(sys.modules, taker.__name__, taker)
    monkeypatch.setattr(integrations, "_INTEGRATIONS", ("taker",))
    arguments = ["--lr", "--mine", "1"]
    assert install(arguments) == ["taker"]
    monkeypatch.setattr(sys, "argv", ["script.py", "--mine", "--lr"])
    assert install() == ["taker"]
    assert (arguments, sys.argv) == (["--lr", "1"], ["script.py", "--lr"])


def test_without_a_block_the_stock_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(model: object = None, config: object = None) -> object:
        return model, config

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    deepspeed_script.rebind(deepspeed)
    assert deepspeed.initialize.__name__ == "initialize"
    for config in ("stock.json", Path("stock.json"), "none.json", {}, {"bf16": {}}, 3, None):
        assert deepspeed.initialize("a model", config=config) == ("a model", config)


def test_the_environment_also_switches_a_called_initialize_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed, "initialize", lambda model=None, config=None: "stock")
    monkeypatch.setenv("TERAPIPE", "0")
    assert terapipe_ds.initialize(model="a model", config="sliced.json") == "stock"
    monkeypatch.setenv("TERAPIPE", "off")
    with pytest.raises(ConfigError, match=r"^TERAPIPE: found 'off'"):
        terapipe_ds.initialize(model="a model", config="sliced.json")


@pytest.mark.parametrize("config", ["sliced.json", Path("sliced.json"), {"terapipe": {}}])
def test_with_a_block_a_model_that_is_no_pipeline_is_refused(config: object) -> None:
    deepspeed_script.rebind(deepspeed)
    # Twice, as by a script that is patched and also started by terapipe_ds.run.
    deepspeed_script.rebind(deepspeed)
    with pytest.raises(ConfigError, match=r"^model: found str, .*--no-pipeline-parallel\); or set"):
        deepspeed.initialize(model="a model", config=config)
