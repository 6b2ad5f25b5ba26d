"""A module is prepared as soon as it has been imported, and no sooner."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from terapipe_ds.integrations.after_import import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "prepared_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("value = 1\n")
    (tmp_path / name / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[loaded]


def change(module: ModuleType) -> None:
    module.value += 1


@pytest.mark.parametrize("part", ["", ".part"])
def test_acts_once_when_the_module_is_imported(package: str, part: str) -> None:
    after_import(package + part, change)
    assert package not in sys.modules
    assert importlib.import_module(package + part).value == 2
    assert importlib.import_module(package + part).value == 2


def test_acts_now_on_a_module_that_is_there(package: str) -> None:
    module = importlib.import_module(package)
    after_import(package, change)
    assert module.value == 2


def test_the_module_is_otherwise_its_own(package: str) -> None:
    plain = importlib.import_module(package)
    expected = type(plain.__loader__), plain.__spec__.origin, list(plain.__path__)
    del sys.modules[package]
    after_import(package, change)
    module = importlib.import_module(package)
    assert (type(module.__loader__), module.__spec__.origin, list(module.__path__)) == expected
    assert module.__loader__.get_source(package) == "value = 1\n"


def test_a_module_that_is_not_there_fails_as_ever(package: str) -> None:
    after_import("no_such_package_anywhere", change)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package_anywhere'"):
            importlib.import_module("no_such_package_anywhere")


def test_several_may_wait_for_one_module(package: str) -> None:
    after_import(package, change)
    after_import(package, change)
    assert importlib.import_module(package).value == 3
