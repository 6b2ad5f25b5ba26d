"""The GPU profile on a CPU, made small: what it writes, what it imports, and what it catches."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from terapipe_ds.planner import CostModel, Fit, Plan, StageCost, StageMemory
from terapipe_ds.runtime import attention, kv_context

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LAYERS = ("gpt3-175b-tp8", "gpt3-13b")
FORMS = {"paper", "joint", "causal", "floor", "table"}
PLANS = [
    (objective, schedule) for schedule in ("gpipe", "1f1b") for objective in ("paper", "simulate")
]
SMALL = ["--small", "--device", "cpu", "--minutes", "0.05"]
# Runs a script as if these packages were not installed.
BLOCKED = """
import os, runpy, sys
for name in ("deepspeed", "megatron", "pydantic"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
# Where `python SCRIPT` looks for the modules beside it; runpy does not.
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of the script without DeepSpeed, megatron and pydantic: its folder and its output."""
    out = tmp_path_factory.mktemp("profile") / "made"
    script = str(BENCHMARKS / "gpu_profile.py")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, script, *SMALL, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.fixture
def gpu_profile(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_profile")


@pytest.fixture
def gpu_plans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes its plans, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_plans")


def result_of(folder: Path) -> dict[str, Any]:
    """``result.json``, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "result.json").read_text(), parse_constant=refuse)


def test_files(small_run: tuple[Path, str]) -> None:
    out, _ = small_run
    expected = {"result.json"}
    expected |= {f"cost-{layer}.json" for layer in LAYERS}
    expected |= {f"plan-{LAYERS[0]}-{objective}-{schedule}.json" for objective, schedule in PLANS}
    if find_spec("matplotlib") is not None:
        expected.add("picture.png")
    assert {path.name for path in out.iterdir()} == expected


def test_result(small_run: tuple[Path, str]) -> None:
    result = result_of(small_run[0])
    assert (result["schema"], result["version"]) == ("terapipe-gpu-profile", 1)
    assert result["ok"] and result["small"] and not result["failed"]
    assert result["machine"]["torch"] == torch.__version__
    parts = {"kernels", "speed", "plans", "picture", *(f"profile {layer}" for layer in LAYERS)}
    assert parts == set(result["seconds"]) and parts <= set(result)


def test_kernels_of_the_result(small_run: tuple[Path, str]) -> None:
    found = result_of(small_run[0])["kernels"]
    assert found["ok"] and found["skipped_for_time"] == 0
    ran = {(row["kernel"], row["dtype"]) for row in found["rows"] if row["status"] == "ok"}
    kernels = ("sdpa", "sdpa flash", "sdpa math", "split", "causal_attention")
    assert ran == {(kernel, dtype) for kernel in kernels for dtype in ("float32", "bfloat16")}
    refused = [row for row in found["rows"] if row["status"] == "refused"]
    assert {row["kernel"] for row in refused} == {"sdpa efficient", "sdpa cudnn"}
    assert all(row["reason"] for row in refused)
    for row in found["rows"]:
        if row["status"] == "ok":
            assert set(row["errors"]) == {"output", "dQ", "dK", "dV"}
            assert max(row["errors"].values()) <= row["tolerance"]


def test_speed_of_the_result(small_run: tuple[Path, str]) -> None:
    rows = result_of(small_run[0])["speed"]["rows"]
    for row in rows:
        assert row["ms"] > 0 and row["rounds"] == len(row["raw_ms"]) >= 1
    picked = {
        (row["length"], row["context"]): row["ran"] for row in rows if row["kernel"] == "sdpa"
    }
    assert picked == {(64, 0): "flash", (16, 48): "flash"}


@pytest.mark.parametrize("layer", LAYERS)
def test_costs(small_run: tuple[Path, str], layer: str) -> None:
    out, _ = small_run
    cost = CostModel.load(out / f"cost-{layer}.json")
    (stage,) = cost.stages
    assert cost.about["layers"] == 1 and cost.about["torch"] == torch.__version__
    assert set(stage.errors) == FORMS
    found = result_of(out)[f"profile {layer}"]
    assert found["held_out_error"] == stage.error
    assert {point["held_out"] for point in found["points"]} == {False, True}
    assert stage.memory is not None
    # Weights and biases of one rank: attention and MLP, in fp32.
    h, parts = cost.about["hidden"], cost.about["tensor_parallel"]
    weights = 12 * h * h // parts + 7 * h // parts + 2 * h + 4 * h
    assert stage.memory.parameters == 4 * weights
    # K and V of this rank's heads.
    assert stage.memory.kv_per_token == 2 * 4 * h // parts


@pytest.mark.parametrize(("objective", "schedule"), PLANS)
def test_plans(small_run: tuple[Path, str], objective: str, schedule: str) -> None:
    plan = Plan.load(small_run[0] / f"plan-{LAYERS[0]}-{objective}-{schedule}.json")
    assert (plan.objective, plan.schedule, plan.stages) == (objective, schedule, 4)
    assert plan.scheme.sequences == 2 and plan.scheme.seq_length == 128
    assert plan.about["layers"] == 2
    assert plan.latency_ms <= plan.unsliced.latency_ms


def test_summary(small_run: tuple[Path, str]) -> None:
    _, printed = small_run
    for line in (
        "Attention against plain math",
        "torch picks",
        "One layer of",
        "Plans for 4 stages",
    ):
        assert line in printed
    assert "all right" in printed


def top_left(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    """What torch's ``is_causal=True`` means on a rectangle."""
    options.pop("dropout_p", None)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    output = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, **options
    )
    return output.permute(2, 0, 1, 3)


def without_context(query: Tensor, kv: kv_context.ContextKV, **options: Any) -> Tensor:
    return top_left(query, *kv.own, **options)


def not_finite(query: Tensor, kv: kv_context.ContextKV, **options: Any) -> Tensor:
    return top_left(query, *kv.own, **options) * float("nan")


def raises(query: Tensor, kv: kv_context.ContextKV, **options: Any) -> Tensor:
    raise RuntimeError("no such kernel")


def without_later_slices(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one


@pytest.mark.parametrize(
    ("module", "name", "wrong", "caught"),
    [
        (attention, "sdpa", top_left, {"sdpa", "sdpa flash", "sdpa math"}),
        (attention, "split", without_context, {"split", "causal_attention"}),
        (attention, "split", not_finite, {"split", "causal_attention"}),
        (attention, "split", raises, {"split", "causal_attention"}),
        (kv_context, "_sum", without_later_slices, {"causal_attention"}),
    ],
    ids=["top-left", "no-context", "not-finite", "raises", "lost-gradient"],
)
def test_a_wrong_kernel_is_caught(
    gpu_profile: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: Any,
    name: str,
    wrong: Callable[..., Any],
    caught: set[str],
) -> None:
    monkeypatch.setattr(module, name, wrong)
    # Part 1 alone decides; the others would run on the wrong kernel and take their time.
    for part in ("time_kernels", "profile"):
        monkeypatch.setattr(gpu_profile, part, skipped)
    assert gpu_profile.main([*SMALL, "--out", str(tmp_path)]) == 1
    result = result_of(tmp_path)
    assert not result["ok"] and not result["kernels"]["ok"]
    rows = [row for row in result["kernels"]["rows"] if row["status"] == "wrong"]
    assert {row["kernel"] for row in rows} == caught


def skipped(*_: Any) -> Any:
    raise RuntimeError("not in this test")


def test_a_failed_part_leaves_the_others(
    gpu_profile: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also: without matplotlib the picture is left out, which is no failure."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(gpu_profile, "make_plans", skipped)
    assert gpu_profile.main([*SMALL, "--out", str(tmp_path)]) == 1
    result = result_of(tmp_path)
    assert list(result["failed"]) == ["plans"] and "not in this test" in result["failed"]["plans"]
    assert result["kernels"]["ok"] and not result["ok"]
    assert (tmp_path / "cost-gpt3-13b.json").exists()
    assert result["picture"] is None and not (tmp_path / "picture.png").exists()
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_without_time_nothing_is_called_right(gpu_profile: Any) -> None:
    found = gpu_profile.check_kernels(gpu_profile.SMALL, torch.device("cpu"), time.monotonic() - 1)
    assert found["rows"] == [] and found["skipped_for_time"] == 36
    assert not found["ok"]


def test_costs_of_more_layers(gpu_plans: Any) -> None:
    fit = Fit("joint", (8.0, 64.0), (1.0, 3.0), (0.5, 0.01), (0.0, 64.0), (0.1, 0.2), 0.5, 4.0)
    memory = StageMemory(1.0, 2.0, 3.0, 4.0, 5.0)
    one = CostModel((StageCost("one", fit, fit, memory=memory),), 128, about={"layers": 1})
    two = gpu_plans.of_layers(one, 2)
    # The first lies below the least time.
    for length, context in ((8, 0), (8, 16), (64, 64), (100, 28)):
        assert two.time(length, context) == pytest.approx(2 * one.time(length, context))
    assert two.stages[0].memory == StageMemory(2.0, 4.0, 6.0, 8.0, 10.0)
    assert two.about["layers"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(
    gpu_profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        gpu_profile.main(["--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert "torch sees no CUDA device; allowed here is cpu" in capsys.readouterr().err
