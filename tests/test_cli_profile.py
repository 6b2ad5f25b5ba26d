"""The command's profile, run as users do, on a tiny model; and how it goes on after a break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.planner import CostModel, Plan, Sample, Transfer
from terapipe_ds.runtime.profiler import chains

from .command_files import MODEL, SHAPE

# Chains that run whatever the budget is.
ESSENTIAL = 4


def profile(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs it in the folder, where ``model.json`` is."""
    command = [sys.executable, "-m", "terapipe_ds.cli", "profile", "model.json", "--stages", "2"]
    return subprocess.run(
        [*command, "--out", "cost.json", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def profiled(
    tmp_path_factory: pytest.TempPathFactory, extensions_built: None
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which a profile has run."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "model.json").write_text(json.dumps(MODEL))
    ended = profile(folder, "--budget", "1s", "--json", "--plot", "profile.png")
    assert ended.returncode == 0, ended.stderr
    return folder, ended


def test_profile(profiled: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """It prints the cost file and nothing else, and leaves the file and the picture alone."""
    folder, ended = profiled
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.json", "cost.json", "profile.png"}
    assert ended.stdout.count("\n") == 1
    assert json.loads(ended.stdout) == json.loads((folder / "cost.json").read_text())
    assert (folder / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_profiled_costs(profiled: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    cost = CostModel.load(profiled[0] / "cost.json")
    assert (cost.seq_length, cost.about["shape"]) == (64, SHAPE)
    assert (cost.about["stages"], cost.about["layers_per_stage"]) == (2, 1)
    assert [stage.name for stage in cost.stages] == ["stage 0", "stage 1"]
    for stage in cost.stages:
        assert stage.error is not None and stage.error == min(stage.errors.values())
        assert set(stage.errors) == {"paper", "joint", "causal", "floor", "table"}
        assert any(sample.held_out for sample in stage.samples)
        assert all(sample.forward_ms > 0 for sample in stage.samples)
        assert all(sample.backward_ms > sample.weight_ms > 0 for sample in stage.samples)
        assert stage.weight is not None
        assert stage.memory is not None
        # K and V of one layer, in single precision.
        assert stage.memory.kv_per_token == 4 * 2 * MODEL["hidden_size"]
        assert stage.memory.parameters == stage.memory.gradients > 4 * 12 * 32**2
        assert stage.memory.optimizer == 2 * stage.memory.parameters
        assert stage.memory.activation_per_token > 0
    # A message is a token's hidden state.
    assert cost.transfer.bytes_per_token == 4 * MODEL["hidden_size"]
    assert cost.transfer.latency_ms + cost.transfer.ms_per_byte > 0
    assert [size for size, _ in cost.transfer.samples] == sorted(
        {64 * 128 // 4**power for power in range(5)}
    )


def test_plan_of_a_profile(
    profiled: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder, _ = profiled
    out = tmp_path / "plan.json"
    same_model = ("--model", str(folder / "model.json"))
    command = ["plan", str(folder / "cost.json"), "--stages", "2", "--sequences", "4"]
    assert main([*command, *same_model, "--out", str(out), "--json"]) == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)) == Plan.load(out)
    found = Plan.load(out)
    assert (found.scheme.sequences, found.scheme.seq_length) == (4, 64)
    assert found.speedup >= 1.0
    assert found.about["shape"] == SHAPE


def partial_of(cost: CostModel, rounds: dict[str, Any], *, sequences: int = 1) -> dict[str, Any]:
    """What a profile with those settings leaves when it is broken off."""
    made = chains(64, sequences=sorted({sequences, 1}, reverse=True), granularity=8)
    written = [[chain.sequences, list(chain.lengths), chain.held_out] for chain in made]
    padded = {
        name: [*each, *([] for _ in range(len(made) - len(each)))] for name, each in rounds.items()
    }
    return {"key": {"about": dict(cost.about), "chains": written}, "rounds": padded}


TRANSFER = ("--latency-us", "250", "--gigabytes-per-s", "2")


def test_a_broken_off_profile_goes_on(
    profiled: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Rounds are kept: here of two chains of one stage, with times that nothing takes."""
    known = [
        [[(1e6, 5e6, 2e6)]],
        [[(1e7 + index, 5e7 + index, 2e7 + index) for index in range(8)]],
    ]
    before = CostModel.load(profiled[0] / "cost.json")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    partial = tmp_path / "cost.json.partial"
    partial.write_text(json.dumps(partial_of(before, {"stage 0": known})))
    ended = profile(tmp_path, "--budget", "0s", *TRANSFER)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", "cost.json"}

    cost = CostModel.load(tmp_path / "cost.json")
    assert cost.about == before.about
    assert cost.transfer == Transfer(latency_ms=0.25, ms_per_byte=5e-7, bytes_per_token=128)
    first, second = cost.stages
    assert first.samples[:9] == (
        Sample(64, 0, 1, 1e6, 5e6, False, 2e6),
        *(Sample(8, 8 * k, 1, 1e7 + k, 5e7 + k, False, 2e7 + k) for k in range(8)),
    )
    slices = sum(len(chain.lengths) for chain in chains(64, sequences=[1], granularity=8)[:4])
    for samples in (first.samples[9:], second.samples):
        assert all(sample.forward_ms < 1e6 for sample in samples)
    assert len(first.samples) == len(second.samples) == slices

    lines = ended.stdout.splitlines()
    assert lines[0].startswith("stage 0: held-out error ")
    assert lines[-1] == "cost file: cost.json"
    assert "message: 250 us and 2.00 GB/s" in lines


def test_a_profile_of_other_settings_is_not_gone_on_with(
    profiled: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Here it was of two sequences a micro-batch."""
    cost = CostModel.load(profiled[0] / "cost.json")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    partial = tmp_path / "cost.json.partial"
    text = json.dumps(partial_of(cost, {"stage 0": []}, sequences=2))
    partial.write_text(text)
    ended = profile(tmp_path, "--budget", "0s", *TRANSFER)
    assert ended.returncode == 2
    assert ended.stdout == ""
    # Libraries warn on stderr when they are imported.
    assert ended.stderr.splitlines()[-1] == (
        "terapipe: profile: found cost.json.partial of another model or other settings, allowed is "
        "to go on with the same; delete it, or change --out"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", "cost.json.partial"}
    assert partial.read_text() == text
