"""The cost model: its formula, its file, and which stage's costs it gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import CostModel, Fit, Sample, StageCost, StageMemory, Transfer

from .costs import line, model, stage

# 2 ms for up to 4 tokens, 4 for 8; then 1/2 ms a token. A context token costs 1, 3 or 5 ms.
FIT = Fit(
    "table",
    tokens=(4.0, 8.0),
    base_ms=(2.0, 4.0),
    jump=(10.0, 0.25),
    lengths=(2.0, 4.0),
    price_ms=(1.0, 3.0),
    own_share=0.5,
    least_ms=3.5,
)
MEMORY = StageMemory(1.0, 2.0, 3.0, 4.5, 5.0)


def full_model() -> CostModel:
    """Every part has a value of its own."""
    samples = (Sample(8, 0, 1, 1.5, 3.0), Sample(8, 16, 2, 2.5, 5.0, True, 1.25))
    parts: dict[str, Any] = {"samples": samples, "memory": MEMORY, "weight": line(0.5, 0.125)}
    first = StageCost("stage 0", FIT, line(1.0, 0.5), 0.01, {"table": 0.01}, **parts)
    transfer = Transfer(0.25, 1e-6, 4096.0, samples=((1e3, 0.251), (1e6, 1.25)))
    return CostModel((first, stage("stage 1")), 512, transfer, {"device": "cpu", "tp": [1, 2]})


@pytest.mark.parametrize(
    ("length", "context", "sequences", "ms"),
    [
        # Base and half of the own tokens; no jump without context.
        (4, 0, 1, 2 + 3 * 2),
        (8, 0, 1, 4 + 7 * 4),
        # Before the first corner both are flat, and after the last go on as before.
        (2, 0, 1, 3.5),
        (3, 0, 1, 2 + 2 * 1.5),
        (12, 0, 1, 6 + 11 * 6),
        # The jump, and the price of each context token.
        (4, 5, 1, 2 + 11 + 3 * 7),
        (4, 1, 1, 2 + 11 + 3 * 3),
        # Two sequences: base and jump by tokens, the price by each sequence's own length.
        (4, 5, 2, 4 + 12 + 2 * 3 * 7),
    ],
)
def test_fit_by_hand(length: int, context: int, sequences: int, ms: float) -> None:
    assert FIT(length, context, sequences) == pytest.approx(ms)


def test_fit_of_one_corner_is_flat() -> None:
    assert Fit("paper", (8.0,), (2.0,))([1, 8, 100], 0).tolist() == [2, 2, 2]


@pytest.mark.parametrize("time", [FIT, full_model().stages[0].time, full_model().time])
def test_scalars_and_arrays_broadcast(time: Any) -> None:
    lengths, contexts, sequences = np.array([4, 8]), np.array([[0], [3], [16]]), 2
    table = time(lengths, contexts, sequences)
    assert table.shape == (3, 2)
    for row, context in enumerate((0, 3, 16)):
        for column, length in enumerate((4, 8)):
            alone = time(length, context, sequences)
            assert np.ndim(alone) == 0
            assert float(alone) == table[row, column]
    assert time(lengths, 0).tolist() == [float(time(4, 0, 1)), float(time(8, 0, 1))]


def test_a_stage_takes_forward_and_backward() -> None:
    costs = StageCost("stage 0", line(1.0, 0.5), line(3.0, 1.0))
    assert costs.time(4, 0) == pytest.approx(1 + 2 + 3 + 4)


def test_weight_gradients_take_no_longer_than_the_backward() -> None:
    costs = StageCost("stage 0", line(1.0, 0.5), line(3.0, 1.0))
    assert costs.weight_share(5, 0) == pytest.approx(4)
    apart = dataclasses.replace(costs, weight=line(0.0, 2.0))
    assert apart.weight_share([1, 5], 0).tolist() == pytest.approx([2, 8])
    assert apart.time(5, 0) == costs.time(5, 0)


def test_the_slowest_stage_counts() -> None:
    """For short slices the one with the larger overhead, for long ones the other."""
    overhead = StageCost("stage 0", line(10.0, 0.0), line(10.0, 0.0))
    steep = StageCost("stage 1", line(0.0, 1.0), line(0.0, 1.0))
    cost = model(overhead, steep)
    assert cost.time(4, 0) == 20
    assert cost.time(40, 0) == 80
    assert cost.time(np.array([4, 40]), 0).tolist() == [20, 80]
    assert type(cost.time(4, 0)) is float


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tokens": ()}, "found a fit with 0 token counts and 2 times"),
        ({"tokens": (4.0,)}, "found a fit with 1 token counts and 2 times"),
        ({"tokens": (8.0, 4.0)}, "found a fit with 2 token counts and 2 times"),
        ({"tokens": (4.0, 4.0)}, "found a fit with 2 token counts and 2 times"),
        ({"price_ms": (1.0,)}, "found a fit with 2 lengths and 1 times"),
        ({"lengths": (4.0, 2.0)}, "found a fit with 2 lengths and 2 times"),
    ],
)
def test_a_fit_refuses_corners_that_do_not_rise(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fit(**{**vars(FIT), **changes})
    assert str(caught.value).startswith(f"cost: {found}, allowed are as many of both")


def test_transfer_recovers_latency_and_bandwidth() -> None:
    sizes = (1e3, 1e5, 1e6, 1e7)
    link = [(size, 0.25 + 2e-6 * size) for size in sizes]
    found = Transfer.fitted([link, link], bytes_per_token=4096.0)
    assert found.latency_ms == pytest.approx(0.25)
    assert found.ms_per_byte == pytest.approx(2e-6)
    assert found.samples == tuple(link)
    assert found.occupied_ms(100) == pytest.approx(100 * 4096 * 2e-6)


def test_transfer_takes_the_median_over_links() -> None:
    good = [(size, 0.25 + 2e-6 * size) for size in (1e3, 1e5, 1e7)]
    slow = [(size, 9 * ms) for size, ms in good]
    found = Transfer.fitted([good, slow, good], bytes_per_token=1.0)
    assert (found.latency_ms, found.ms_per_byte) == pytest.approx((0.25, 2e-6))


def test_transfer_is_never_negative() -> None:
    """Noise that makes a large message faster than a small one."""
    rising = Transfer.fitted([[(1e3, 1e-4), (1e6, 1.0), (2e6, 2.0)]], bytes_per_token=1.0)
    falling = Transfer.fitted([[(1e3, 1.0), (1e6, 0.9)]], bytes_per_token=1.0)
    assert rising.latency_ms == falling.ms_per_byte == 0
    assert rising.ms_per_byte > 0 < falling.latency_ms


def test_no_transfer_takes_no_time() -> None:
    assert Transfer().occupied_ms(1000) == Transfer().latency_ms == 0


def test_one_stage_stands_for_all() -> None:
    cost = model(stage("stage 0"))
    assert [cost.stage(k, 5) for k in range(5)] == [cost.stages[0]] * 5
    assert cost.stage(0, 1) is cost.stages[0]


def test_stages_of_each_kind() -> None:
    cost = model(stage("first"), stage("middle"), stage("last"))
    for stages in (2, 3, 5):
        names = [cost.stage(k, stages).name for k in range(stages)]
        assert names == ["first", *["middle"] * (stages - 2), "last"]
    with pytest.raises(ConfigError, match="found costs of 3 stages for a pipeline of 1"):
        cost.stage(0, 1)


def test_every_stage_has_its_own() -> None:
    cost = model(*(stage(f"stage {k}") for k in range(3)))
    assert [cost.stage(k, 3).name for k in range(3)] == ["stage 0", "stage 1", "stage 2"]
    for stages in (1, 2, 4):
        with pytest.raises(ConfigError) as caught:
            cost.stage(0, stages)
        assert str(caught.value) == (
            f"cost: found costs of 3 stages for a pipeline of {stages}, allowed are as many; "
            "change --stages, or profile that pipeline"
        )


def test_covers_what_was_measured() -> None:
    cost = model(seq_length=256)
    cost.check_covers(256)
    with pytest.raises(ConfigError) as caught:
        cost.check_covers(257)
    assert str(caught.value) == (
        "cost: found measurements up to 256 tokens for sequences of 257, allowed are sequences up "
        "to what was measured; change --seq-length or profile longer sequences"
    )


@pytest.mark.parametrize("cost", [full_model(), model()])
def test_round_trip(tmp_path: Path, cost: CostModel) -> None:
    path = tmp_path / "new" / "cost.json"
    cost.save(path)
    assert CostModel.load(path) == CostModel.load(str(path)) == cost
    assert CostModel.from_dict(cost.to_dict()) == cost
    assert [entry.name for entry in path.parent.iterdir()] == ["cost.json"]
    content = json.loads(path.read_text())
    assert (content["schema"], content["version"]) == ("terapipe-cost", 1)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        CostModel.load(path)
    message = str(caught.value)
    assert message.startswith("cost: found ")
    assert "'terapipe profile'" in message
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"", b'{"schema":', b"\xff\xfe\x00"])
def test_refuses_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    assert "which cannot be read" in refusal(path)


def test_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "which cannot be read" in refusal(tmp_path / "cost.json")
    assert "which cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"schema": "terapipe-plan", "version": 1}, "('terapipe-plan', 1)"),
        ({"schema": "terapipe-cost", "version": 2}, "('terapipe-cost', 2)"),
        ({"schema": "terapipe-cost"}, "('terapipe-cost', None)"),
        ({}, "(None, None)"),
        ([], "()"),
        (None, "()"),
    ],
)
def test_refuses_another_schema(tmp_path: Path, content: Any, found: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(content))
    assert f"found schema {found} in {path}, allowed is ('terapipe-cost', 1)" in refusal(path)


def parts(content: dict[str, Any], prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the fields of the file are that it cannot do without."""
    return [
        *[("about",), ("seq_length",), ("transfer",), ("stages",), ("transfer", "samples")],
        *[("stages", 0, name) for name in content["stages"][0]],
        *[("stages", 0, "forward", name) for name in ("form", "tokens", "base_ms", "price_ms")],
        *[("stages", 0, "memory", name) for name in content["stages"][0]["memory"]],
    ]


@pytest.mark.parametrize("part", parts(full_model().to_dict()), ids=str)
def test_refuses_a_file_without_a_part(tmp_path: Path, part: tuple[Any, ...]) -> None:
    content = json.loads(json.dumps(full_model().to_dict()))
    holder = content
    for name in part[:-1]:
        holder = holder[name]
    del holder[part[-1]]
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(content))
    message = refusal(path)
    assert "a part that is missing or wrong" in message
    assert str(part[-1]) in message


WRONG = [
    ("seq_length", "long"),
    ("seq_length", None),
    ("transfer", 3),
    ("transfer", {"samples": [], "speed": 1.0}),
    ("transfer", {"samples": [1.0]}),
    ("stages", 3),
    ("stages", [3]),
    ("stages", [{"name": "stage 0"}]),
]


@pytest.mark.parametrize(("part", "value"), WRONG)
def test_refuses_a_wrong_part(part: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel.from_dict({**full_model().to_dict(), part: value}, where="here")
    assert str(caught.value).startswith("cost: found here with a part that is missing or wrong")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("part", "value"), [("stages", []), ("about", 5)])
def test_refuses_an_empty_part(part: str, value: Any) -> None:
    test_refuses_a_wrong_part(part, value)


def test_refuses_a_jump_of_three_numbers() -> None:
    content = full_model().to_dict()
    content["stages"][0]["forward"]["jump"] = [1.0, 2.0, 3.0]
    with pytest.raises(ConfigError):
        CostModel.from_dict(content)
