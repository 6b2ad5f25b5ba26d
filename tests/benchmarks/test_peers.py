"""The comparison with other engines: all do the same, and a wrong one is noticed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks

from . import engines

pytestmark = pytest.mark.distributed

NAMES = [
    "DeepSpeed",
    "torch 1F1B",
    "torch interleaved zero-bubble",
    "torch ZBV",
    "megatron-core 1F1B",
]
# Two matrices of keys and values in fp32, of a stage's layers.
KV_BYTES = 2 * 4 * engines.TOKENS * engines.HIDDEN * engines.LAYERS // 2


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, extensions_built: None
) -> list[dict[str, Any]]:
    """What two ranks found."""
    found = run_ranks(engines.compare, 2, tmp_path_factory.mktemp("peers"), timeout=120)
    return [result.value for result in found]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(engines.BENCHMARKS))
    return importlib.import_module("peers")


@pytest.mark.parametrize("setting", [1, 2, 5, "sleeping"])
def test_all_engines_have_the_same_loss_and_gradients(
    compared: list[dict[str, Any]], peers: Any, setting: int | str
) -> None:
    for found in compared:
        errors = found[setting]
        # 5 micro-batches are no multiple of interleaved zero-bubble's rounds.
        expected = [name for name in NAMES if setting != 5 or "interleaved" not in name]
        ours = ["ours"] if setting == "sleeping" else ["ours", "ours, split"]
        assert list(errors) == expected + ours
        assert all(max(pair) <= peers.TOLERANCE for pair in errors.values()), errors


def test_a_wrong_gradient_is_noticed(compared: list[dict[str, Any]], peers: Any) -> None:
    for found in compared:
        assert max(found["wrong"]["ours"]) > 100 * peers.TOLERANCE


def test_torch_splits_backwards_too(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        one_f_one_b, interleaved, zbv = found["put off"]
        assert one_f_one_b == 0 and interleaved > 0 and zbv > 0


def test_every_engine_is_timed_or_says_why_not(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        rows = {row["name"]: row for row in found["rows"]}
        assert list(rows) == [*NAMES, "ours", "ours, split"]
        refused = rows.pop("torch interleaved zero-bubble")
        assert "multiple" in refused["refused"] and refused["seconds"] == []
        assert all(len(row["seconds"]) == 2 for row in rows.values())
        assert rows["ours"]["slices"] == "[20, 30, 14]"
        runs = {row["name"]: row["runs"] for row in found["one micro-batch"]}
        # What torch's 1F1B refuses with fewer micro-batches than stages.
        assert runs["torch 1F1B"] == "GPipe" and runs["ours, split"] == "zb-h1"


def test_held_bytes(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        held = found["held"]
        assert held[1]["kv"] == KV_BYTES
        # dK and dV of the first two slices' tokens.
        assert held[1]["kv_grads"] == KV_BYTES * (20 + 30) // engines.TOKENS
        assert held[1]["activations"] > KV_BYTES
        # 1f1b holds as much whatever the number of micro-batches.
        assert held[3] == held[6]
        assert held[1]["activations"] <= held[3]["activations"] < 2 * held[1]["activations"]


def rows(**settings: tuple[float, float]) -> list[dict[str, Any]]:
    """Of two stages, for each number of micro-batches the seconds of (a peer, ours)."""
    made = []
    for setting, (peer, ours) in settings.items():
        count = int(setting.removeprefix("d"))
        for name, is_ours, seconds in (("slow", False, 9.0), ("peer", False, peer)):
            made.append(_row(count, name, is_ours, seconds))
        for name, is_ours, seconds in (("late", True, 9.0), ("ours", True, ours)):
            made.append({**_row(count, name, is_ours, seconds), "slices": "[1, 1]"})
    return made


def _row(count: int, name: str, is_ours: bool, seconds: float) -> dict[str, Any]:
    return {
        "stages": 2,
        "seq_length": 64,
        "micro_batches": count,
        "name": name,
        "is_ours": is_ours,
        "runs": "",
        "seconds": [seconds, seconds + 0.1, seconds - 0.1],
    }


def test_where_a_peer_wins(peers: Any) -> None:
    assert peers.peer_wins(rows(d1=(2.0, 1.5), d2=(2.0, 1.99))) == []
    (clear,) = peers.peer_wins(rows(d1=(2.0, 1.5), d8=(1.5, 2.0)))
    assert "8 micro-batches: peer by 33.3% over ours in slices of [1, 1]" in clear
    assert "overlap" not in clear
    (close,) = peers.peer_wins(rows(d8=(1.98, 2.0)))
    assert "overlap" in close


@pytest.mark.parametrize(
    ("settings", "met"),
    [
        ({"d1": (2.0, 1.9), "d2": (2.0, 1.9), "d8": (2.0, 2.05)}, [True, True]),
        ({"d1": (2.0, 1.9), "d2": (2.0, 2.0), "d8": (2.0, 2.05)}, [False, True]),
        ({"d1": (2.0, 2.1), "d2": (2.0, 1.9), "d8": (2.0, 2.07)}, [False, False]),
        # Nothing is asked of 4.
        ({"d4": (1.0, 2.0)}, []),
        ({"d1": (2.0, 1.9), "d4": (1.0, 2.0)}, [True]),
    ],
)
def test_targets(peers: Any, settings: dict[str, tuple[float, float]], met: list[bool]) -> None:
    assert list(peers.targets(rows(**settings)).values()) == met


def test_summary_leaves_out_what_did_not_run(peers: Any) -> None:
    found = rows(d2=(2.0, 1.0))
    found[0] = {**found[0], "seconds": [], "refused": "too few"}
    lines = peers.summary(found)
    assert not any(line.startswith("slow") for line in lines)
    assert any(line.startswith("ours") and "1.00x" in line for line in lines)
    assert any(line.startswith("peer") and "2.00x" in line for line in lines)
    assert "nowhere" in lines


def test_widths(peers: Any) -> None:
    assert [peers.width(length) for length in (512, 513, 2048, 8192)] == [384, 256, 128, 64]
