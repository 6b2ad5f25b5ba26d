"""``terapipe doctor``: each check with good and bad input, and the command as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from terapipe_ds import doctor, integrations, versions
from terapipe_ds.checks import libraries, script, settings, surroundings
from terapipe_ds.checks.findings import Finding
from terapipe_ds.checks.libraries import Device, Library
from terapipe_ds.cli import main
from terapipe_ds.config import read_block
from terapipe_ds.errors import ConfigError

from .command_files import MODEL

ROOT = Path(__file__).parents[1]
TORCH = str(versions.TESTED["torch"].newest)
CPU = Device("cpu", 1, True, False, "gloo")
LIKE_MEGATRON = {"deepspeed", "megatron.training"}


def said(findings: list[Finding], status: str) -> str:
    """The only finding's text."""
    assert [finding.status for finding in findings] == [status], findings
    assert "\n" not in findings[0].text
    return findings[0].text


def block(**values: Any) -> Any:
    return read_block({"terapipe": values})


# Libraries


@pytest.mark.parametrize(
    ("found", "status"),
    [("3.11.7", "ok"), ("3.10.1", "note"), ("3.14.0", "note"), ("3.9.18", "refused")],
)
def test_python(found: str, status: str) -> None:
    assert found in said(libraries.check_python(found), status)


@pytest.mark.parametrize(
    ("library", "moved", "status", "text"),
    [
        (Library("torch", f"{TORCH}+cpu", None), None, "ok", f"{TORCH}+cpu, tested is "),
        (Library("torch", "2.1.0", None), None, "note", "2.1.0, tested is "),
        (Library("torch", "99.0", None), None, "note", "99.0, tested is "),
        (Library("deepspeed", None, "ImportError: no"), None, "refused", "pip install deepspeed"),
        (Library("deepspeed", "0.19.8", "OSError: x"), None, "refused", "imported (OSError: x)"),
        (Library("deepspeed", "0.19.8", None), "names gone", "refused", "names gone"),
    ],
)
def test_library(library: Library, moved: str | None, status: str, text: str) -> None:
    assert text in said(libraries.check_library(library, moved), status)


def test_what_is_installed_is_found_and_tested() -> None:
    for name in versions.MODULES:
        library = libraries.load(name)
        assert library.version is not None and library.error is None
        said(libraries.check_library(library), "ok")


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    library = libraries.load("megatron-core")
    assert library.version == version("megatron-core")
    assert library.error is not None and library.error.startswith("ModuleNotFoundError: ")


def test_another_package_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-DeepSpeed's own ``megatron.core``, which tells no version."""
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    library = libraries.load("megatron-core")
    assert "comes first on the path" in said(libraries.check_library(library), "note")
    found = [each for each in doctor.examine(doctor.Case()) if each.check == "megatron-core"]
    assert [each.status for each in found] == ["note"]


def test_names_that_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.moved_names("deepspeed") is None
    from deepspeed.runtime.pipe.engine import PipelineEngine

    monkeypatch.delattr(PipelineEngine, "_next_batch")
    assert "without PipelineEngine._next_batch" in str(libraries.moved_names("deepspeed"))
    # Older or newer than what can be imported here at all.
    monkeypatch.setitem(sys.modules, libraries.SEAMS["megatron-core"][0], None)
    assert "names have moved (ModuleNotFoundError" in str(libraries.moved_names("megatron-core"))


@pytest.mark.parametrize(
    ("device", "ds_config", "refused"),
    [
        (CPU, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}, []),
        (CPU, {"fp16": {"enabled": True}}, ["fp16.enabled: found true on cpu"]),
        (Device("xpu", 8, False, True, "ccl"), {}, ["dist_backend: found 'ccl', allowed are"]),
        (Device("cuda", 8, False, True, "nccl"), {"bf16": {"enabled": True}}, ["bf16.enabled: "]),
    ],
)
def test_device(device: Device, ds_config: dict[str, Any], refused: list[str]) -> None:
    first, *others = libraries.check_device(device, ds_config)
    assert f"{device.number} x {device.name}" in said([first], "ok")
    assert len(others) == len(refused)
    for finding, text in zip(others, refused, strict=True):
        assert said([finding], "refused").startswith(text)


# Surroundings


@pytest.mark.parametrize(
    ("value", "text"), [("0", "TERAPIPE: found 0 (off)"), ("off", "TERAPIPE: found 'off'")]
)
def test_switched_off(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    monkeypatch.delenv("TERAPIPE", raising=False)
    assert surroundings.check_switch() == []
    monkeypatch.setenv("TERAPIPE", value)
    assert said(surroundings.check_switch(), "refused").startswith(text)


def test_hardware_queues() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert surroundings.check_queues("gloo", one) == []
    assert surroundings.check_queues("nccl", {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}) == []
    assert surroundings.check_queues("nccl", {}) == []
    text = said(surroundings.check_queues("nccl", one), "refused")
    assert text.startswith("CUDA_DEVICE_MAX_CONNECTIONS: found 1, allowed is 2 or more")


def test_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said(surroundings.check_cache(tmp_path / "not" / "there"), "ok")
    assert not (tmp_path / "not").exists()
    text = said(surroundings.check_cache(tmp_path / "file" / "costs"), "note")
    assert "set TERAPIPE_CACHE" in text


def test_where_extensions_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    found = surroundings.extensions_folder({"XDG_CACHE_HOME": "/caches"})
    assert str(found) == cpp_extension.get_default_build_root()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(surroundings.extensions_folder({})) == cpp_extension.get_default_build_root()
    assert surroundings.extensions_folder({"TORCH_EXTENSIONS_DIR": "/mine"}) == Path("/mine")


@pytest.mark.parametrize("where", ["deepspeed_shm_comm", "py311_cpu/deepspeed_shm_comm"])
def test_locks(tmp_path: Path, where: str) -> None:
    said(surroundings.check_locks(tmp_path / "none", now=0.0), "ok")
    lock = tmp_path / where / "lock"
    lock.parent.mkdir(parents=True)
    said(surroundings.check_locks(tmp_path, now=0.0), "ok")
    lock.touch()
    os.utime(lock, (1000.0, 1000.0))
    assert str(lock) in said(surroundings.check_locks(tmp_path, now=1010.0), "note")
    text = said(surroundings.check_locks(tmp_path, now=4600.0), "refused")
    assert "60 minutes old" in text and text.endswith(f"; delete {lock}")


def test_two_programs_of_one_name(tmp_path: Path) -> None:
    for folder, mode in (("a", 0o755), ("b", 0o755), ("c", 0o644)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ninja").touch(mode)
    (tmp_path / "link").symlink_to(tmp_path / "a")

    def found(*folders: str) -> list[Path]:
        path = os.pathsep.join(str(tmp_path / folder) for folder in folders)
        return surroundings.programs("ninja", path)

    assert surroundings.check_ninja(found("a", "link", "c", "none")) == []
    both = found("b", "a", "link")
    assert both == [tmp_path / "b" / "ninja", tmp_path / "a" / "ninja"]
    assert f"({both[0]}, {both[1]})" in said(surroundings.check_ninja(both), "note")


# Settings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {},
            "slices measured and planned in the first step (at most 120 s), multiples of 8 tokens; "
            "schedule 1f1b; loss as the model declares",
        ),
        (
            {"slices": 4, "schedule": "zb-h1", "loss": "per_slice"},
            "4 slices, as even as they go; schedule zb-h1; loss slice by slice",
        ),
        (
            {"slices": [24, 8], "loss": "whole_sequence", "trace": "out"},
            "2 slices of 24, 8 tokens; schedule 1f1b; loss of joined outputs; steps [2] traced in "
            "out",
        ),
        (
            {"slices": "[(1, [8, 8])] * 2"},
            "groups of sequences [(1, [8, 8])] * 2; schedule 1f1b; loss as the model declares",
        ),
    ],
)
def test_block_in_words(values: dict[str, Any], words: str) -> None:
    found, findings = settings.check_block({"terapipe": values})
    assert found == block(**values)
    assert said(findings, "ok") == words


@pytest.mark.parametrize(
    ("ds_config", "text"),
    [
        ({}, 'terapipe: found no "terapipe" block'),
        ({"terapipe": {"slice": 4}}, "terapipe.slice: found an unknown key"),
        ({"terapipe": {"enabled": False}}, "terapipe.enabled: found false"),
    ],
)
def test_block_that_slices_nothing(ds_config: dict[str, Any], text: str) -> None:
    assert said(settings.check_block(ds_config)[1], "refused").startswith(text)


@pytest.mark.parametrize(
    ("ds_config", "refused"),
    [
        ({"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}, []),
        ({"zero_optimization": True, "fp16": {"enabled": True}}, []),
        ({"zero_optimization": {"stage": "auto"}, "flops_profiler": {"enabled": False}}, []),
        ({"zero_optimization": {"stage": 2}}, ["zero_optimization.stage: found 2, "]),
        ({"fp16": {"enabled": True}}, ["zero_optimization.stage: found 0 with fp16, "]),
        (
            {"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True}},
            ["zero_optimization.stage: found 3, ", "compile.deepcompile: found true, "],
        ),
    ],
)
def test_deepspeeds_own_settings(ds_config: dict[str, Any], refused: list[str]) -> None:
    findings = settings.check_ds_config(ds_config)
    if not refused:
        said(findings, "ok")
        return
    assert len(findings) == len(refused)
    for finding, text in zip(findings, refused, strict=True):
        assert said([finding], "refused").startswith(text)


def test_a_curriculum_is_refused_with_some_arguments() -> None:
    sampled = {"data_sampling": {"curriculum_learning": {"enabled": True}}}
    text = said(settings.check_ds_config({"data_efficiency": sampled}), "note")
    assert text.startswith("refused with several stages: data_efficiency.data_sampling.curriculum")


@pytest.mark.parametrize(
    ("values", "sizes", "status", "text"),
    [
        ({"slices": 4}, {}, "ok", "64 tokens are cut into [(1, [16, 16, 16, 16])]"),
        ({"slices": [40, 24]}, {"sequences": 2}, "ok", "into [(2, [40, 24])]"),
        ({"slices": "[(1, [64])] * 2"}, {}, "ok", "into [(1, [64])] * 2"),
        ({}, {"multiple_of": 3}, "refused", "seq_length: found 64 tokens, allowed are multiples"),
        ({}, {"multiple_of": 16}, "ok", "cut in multiples of 16"),
        ({"slices": 65}, {}, "refused", "terapipe.slices: found 65 slices"),
        ({"slices": [40, 20]}, {}, "refused", "terapipe.slices: found lengths that sum to 60"),
        ({"slices": [41, 23]}, {"multiple_of": 2}, "refused", "found a slice of 41 tokens"),
        ({"slices": 3}, {"multiple_of": 4}, "ok", "[24, 20, 20]"),
        ({"slices": "[(1, [64])] * 2"}, {"sequences": 4}, "refused", "that cover 2 sequences"),
        ({"slices": 2}, {"at_most": 32}, "refused", "--seq-length: found 64 tokens for a model of"),
    ],
)
def test_slices_that_fit(
    values: dict[str, Any], sizes: dict[str, Any], status: str, text: str
) -> None:
    given = {"seq_length": 64, "multiple_of": 1, "sequences": None, "at_most": None, **sizes}
    assert text in said(settings.check_fit(block(**values), **given), status)


def test_sequences_of_a_micro_batch() -> None:
    key = "train_micro_batch_size_per_gpu"
    found = [settings.sequences_of({key: value}) for value in (3, "auto", 0, True)]
    assert [*found, settings.sequences_of({})] == [3, None, None, None, None]


# The script


def test_script_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    lines = ("import deepspeed.comm", "from megatron.training import x", "from .beside import y")
    path.write_text("\n".join([*lines, "1 / 0"]))
    imports, findings = script.check_script(path)
    assert said(findings, "ok") == str(path)
    assert imports == {"deepspeed.comm", "megatron.training"}
    path.write_text("import (")
    assert "which is no Python (SyntaxError" in said(script.check_script(path)[1], "refused")
    assert "found none at" in said(script.check_script(tmp_path / "none.py")[1], "refused")


@pytest.mark.parametrize(
    ("imports", "like"),
    [
        (LIKE_MEGATRON, True),
        ({"deepspeed.pipe", "megatron"}, True),
        ({"deepspeed", "megatron.core", "megatron.core.mpu"}, False),
        ({"megatron.training"}, False),
        ({"deepspeed", "megatronics"}, False),
    ],
)
def test_scripts_like_megatron_deepspeeds(imports: set[str], like: bool) -> None:
    assert script.is_like_megatron_deepspeed(imports) is like


def test_integrations_are_asked_and_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "sliced.json").write_text('{"terapipe": {}}')
    (tmp_path / "stock.json").write_text("{}")
    before = list(sys.meta_path)
    argv = ["--deepspeed_config", str(tmp_path / "sliced.json")]
    names, findings = script.check_integrations(argv)
    assert names == ["deepspeed_script"]
    assert said(findings, "ok").startswith("deepspeed_script: Scripts that call deepspeed.init")
    argv[1] = str(tmp_path / "stock.json")
    names, findings = script.check_integrations(argv)
    assert names == []
    said(findings, "note")
    assert sys.meta_path == before


def test_what_an_integration_refuses_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def applies(argv: list[str]) -> bool:
        raise ConfigError(f"{argv.pop()}: found it")

    strict = ModuleType("terapipe_ds.integrations.strict")
    strict.applies = applies
    monkeypatch.setitem(sys.modules, strict.__name__, strict)
    monkeypatch.setattr(integrations, "_INTEGRATIONS", ("strict",))
    argv = ["--mine"]
    assert said(script.check_integrations(argv)[1], "refused") == "--mine: found it"
    assert argv == ["--mine"], "its own list"


def test_every_integration_can_be_asked() -> None:
    for name in integrations._INTEGRATIONS:
        module = __import__(f"terapipe_ds.integrations.{name}", fromlist=["applies"])
        assert isinstance(module.applies([]), bool)


@pytest.mark.parametrize(
    ("argv", "ds_config", "refused"),
    [
        (["--lr", "1", "--num-experts", "1", "--ds-sequence-parallel-size=1"], {}, []),
        ([], {"curriculum_learning": {"enabled": False}}, []),
        (["--use-flash-attn-v2"], {}, ["--use-flash-attn-v2: found True, allowed is none"]),
        (
            ["--sequence-parallel", "--num-experts", "4"],
            {},
            ["--sequence-parallel: found True", "--num-experts: found 4, allowed is none"],
        ),
        (["--ds-sequence-parallel-size=2"], {}, ["--ds-sequence-parallel-size: found 2"]),
        (["--num-experts-switch", "2"], {}, ["--num-experts-switch: found '2'"]),
        (["--no-pipeline-parallel"], {}, ["--no-pipeline-parallel: found True"]),
        ([], {"curriculum_learning": {"enabled": True}}, ["curriculum_learning in the DeepSpeed"]),
    ],
)
def test_options(argv: list[str], ds_config: dict[str, Any], refused: list[str]) -> None:
    def found(imports: set[str], names: list[str], **values: Any) -> list[Finding]:
        return script.check_options(
            argv, names=names, imports=imports, ds_config=ds_config, block=block(**values)
        )

    findings = found(LIKE_MEGATRON, ["deepspeed_script"])
    if not refused:
        said(findings, "ok")
    for finding, text in zip(findings, refused, strict=False):
        assert said([finding], "refused").startswith(text)
    # Of another script nobody knows whether it means the same.
    assert [finding.status for finding in found(set(), ["deepspeed_script"])] == ["note"] * len(
        refused
    )
    assert found(LIKE_MEGATRON, ["another"]) == []
    split = found(LIKE_MEGATRON, ["deepspeed_script"], schedule="zb-h1")
    assert len(split) == len(refused) + 1
    assert split[-1].status == "refused" and 'found "zb-h1"' in split[-1].text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tensor-model-parallel-size", "4"], 1),
        (["--tensor-model-parallel-size", "4", "--sequence-parallel"], 4),
        (["--sequence-parallel"], 1),
    ],
)
def test_what_slices_are_multiples_of(argv: list[str], expected: int) -> None:
    assert script.multiple_of(argv) == expected


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files, and nothing about the environment that speaks against it."""
    for name in ("TERAPIPE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("TERAPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    texts = {
        "good.json": '{"train_micro_batch_size_per_gpu": 1, "terapipe": {"slices": 4}}',
        "bad.json": '{"zero_optimization": {"stage": 2}, "terapipe": {"slices": 65}}',
        "commented.json": '{\n  // hjson\n  "terapipe": {"slices": 4}\n}',
        "slices.json": '{"slices": [40, 24]}',
        "model.json": json.dumps(MODEL),
        "list.json": "[]",
        "script.py": "import deepspeed\nraise SystemExit('it was run')\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def doctors(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code: Any = main(["doctor", *line.split()])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


GOOD = "--model model.json script.py --lr 1 --deepspeed_config good.json --json"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--deepspeed-config good.json",
        "--deepspeed-config commented.json --model model.json",
        "script.py --deepspeed_config=good.json --seq-length 64",
        "script.py --terapipe-config slices.json --seq-length 64",
        # What stands behind the script is the script's, --json too.
        GOOD,
    ],
)
def test_nothing_speaks_against_it(
    capsys: pytest.CaptureFixture[str], folder: Path, line: str
) -> None:
    before = sorted(folder.rglob("*"))
    code, out, err = doctors(capsys, line)
    assert (code, err) == (0, ""), out
    lines = out.splitlines()
    assert lines[-1].startswith("nothing speaks against slicing")
    assert len(lines) <= 30 and "refused" not in out
    assert len({line.index(line.split(maxsplit=2)[2]) for line in lines[:4]}) == 1, "aligned"
    assert sorted(folder.rglob("*")) == before
    assert ("no DeepSpeed JSON was named" in out) == (not line)


def test_settings_that_the_environment_names(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAPIPE_CONFIG", "slices.json")
    code, out, _ = doctors(capsys, "script.py --seq-length 64")
    assert code == 0 and "64 tokens are cut into" in out
    assert "are cut into" not in doctors(capsys, "")[1]
    # The script's own option comes first.
    code, _, err = doctors(capsys, "script.py --terapipe-config list.json")
    assert code == 2 and "found list in list.json" in err


def test_all_that_is_refused_is_listed(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAPIPE", "0")
    command = "none.py --deepspeed_config bad.json"
    code, out, err = doctors(capsys, f"--model model.json {command}")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1].startswith("4 refused: change these")
    code, out, err = doctors(capsys, f"--json --model model.json {command}")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["refused"] == 4
    assert {"check": "slices", "status": "refused"}.items() <= found["findings"][-1].items()
    refused = [each["check"] for each in found["findings"] if each["status"] == "refused"]
    assert refused == ["environment", "deepspeed JSON", "script", "slices"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--deepspeed-config none.json", "found none.json, which cannot be read (FileNotFound"),
        ("script.py --deepspeed_config script.py", "found script.py, which cannot be read"),
        ("script.py --terapipe-config list.json", "--terapipe-config: found list in list.json"),
        ("--deepspeed-config list.json", "found list in list.json, allowed is a JSON object"),
        ("--model good.json", "model: found a wrong num_layers in good.json"),
        ("--deepspeed-config good.json script.py --deepspeed_config good.json", "drop one"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], folder: Path, line: str, says: str) -> None:
    code, out, err = doctors(capsys, line)
    assert (code, out) == (2, "")
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("model", ["", "--model model.json "])
def test_the_scripts_own_sequence_length_counts(
    capsys: pytest.CaptureFixture[str], folder: Path, model: str
) -> None:
    line = f"{model}script.py --deepspeed_config good.json --seq-length 3"
    code, out, _ = doctors(capsys, line)
    assert code == 1
    assert "terapipe.slices: found 4 slices for a sequence of 3 tokens" in out


def test_broken_installations_are_findings(folder: Path) -> None:
    """Neither torch nor what stands on it can be imported."""
    (folder / "broken" / "torch").mkdir(parents=True)
    (folder / "broken" / "torch" / "__init__.py").write_text("print('loud')\nraise OSError('lib')")
    result = subprocess.run(
        [sys.executable, "-m", "terapipe_ds.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": f"{folder / 'broken'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "")
    refused = {
        each["check"]: each["text"]
        for each in json.loads(result.stdout)["findings"]
        if each["status"] == "refused"
    }
    assert list(refused) == ["torch", "deepspeed", "megatron-core"]
    assert "which cannot be imported (OSError: lib)" in refused["torch"]


def test_what_the_doctor_reads_with() -> None:
    """Nothing of the report is lost where a library is broken: its files import without."""
    code = (
        "import sys; sys.modules.update(torch=None, deepspeed=None, megatron=None);"
        "import terapipe_ds.doctor"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_a_case_without_a_script() -> None:
    assert doctor.read_case() == doctor.Case()
