"""The tested versions: what is installed is one of them, and others are warned of."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule

import terapipe_ds
from terapipe_ds import versions
from terapipe_ds.versions import TESTED, Range, outside

ROOT = Path(__file__).parents[1]
BOUNDS = Range("0.15.3", "0.16.1")


@pytest.mark.parametrize("name", TESTED)
def test_what_is_installed_is_inside(name: str) -> None:
    assert not outside(version(name), TESTED[name])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("0.15.3", False),
        ("0.15.10", False),
        ("0.16.0+cpu", False),
        ("0.16.1.post1", False),
        ("0.16.1.4", False),
        ("0.15.2", True),
        ("0.16.2", True),
        ("0.9.9", True),
        ("1.0", True),
        ("unknown", True),
    ],
)
def test_outside(found: str, expected: bool) -> None:
    assert outside(found, BOUNDS) is expected


@pytest.mark.parametrize("name", ["deepspeed", "megatron-core"])
def test_installing_allows_what_is_tested(name: str) -> None:
    """Package managers are told the same range; of torch, which people choose by their drivers, a
    wider one."""
    assert f'"{name}>={TESTED[name].oldest},' in (ROOT / "pyproject.toml").read_text()


def test_documents_name_the_tested_versions() -> None:
    text = (ROOT / "README.md").read_text()
    for name, tested in TESTED.items():
        spelt = {"deepspeed": "DeepSpeed"}.get(name, name)
        assert f"{spelt} {tested}" in text


def in_use(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(versions, "MODULES", {name: f"as_if_{name}" for name in found})
    for name, number in found.items():
        module = ModuleType(f"as_if_{name}")
        module.__version__ = number
        monkeypatch.setitem(versions.sys.modules, module.__name__, module)


def test_another_package_of_that_name_is_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-DeepSpeed's own ``megatron.core``."""
    in_use(monkeypatch, torch="99.0")
    assert versions.in_use() == {"torch": "99.0"}
    del versions.sys.modules["as_if_torch"].__version__
    assert versions.in_use() == {}
    assert versions.warning(versions.in_use()) is None


def test_untested_versions_are_warned_of_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use(monkeypatch, torch=TESTED["torch"].newest, deepspeed="99.1.2")
    with pytest.warns(UserWarning) as caught:
        versions.warn(0)
    assert [str(each.message) for each in caught] == [
        f"versions: found deepspeed 99.1.2, tested are deepspeed {TESTED['deepspeed']}; losses may "
        "differ from unsliced training: compare a few steps with TERAPIPE=0, or install a tested "
        "version"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn(1)


def test_tested_versions_and_those_not_imported_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use(monkeypatch, torch=TESTED["torch"].oldest)
    monkeypatch.setitem(versions.MODULES, "megatron-core", "never_imported")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn(0)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_building_an_engine_warns(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    in_use(monkeypatch, deepspeed="99.1.2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(deepspeed, "initialize", lambda model=None, config=None: "built")
    module = PipelineModule.__new__(PipelineModule)
    torch.nn.Module.__init__(module)
    module.token_slice_adapter = "its own"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert terapipe_ds.initialize(model=module, config={"terapipe": {}}) == "built"
    assert ["found deepspeed 99.1.2" in str(each.message) for each in caught] == [True] * (
        rank == "0"
    )
