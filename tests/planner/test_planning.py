"""Plans: what is chosen, what it is compared with, and its file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import (
    Candidate,
    CostModel,
    Plan,
    StageCost,
    StageMemory,
    Transfer,
    paper_latency,
    peak_memory,
    plan,
    predict,
    solve,
)
from terapipe_ds.scheme import SliceScheme

from .costs import KINDS, Formula, line, model, random_table, stage

MIB = 2**20
MEMORY = StageMemory(
    parameters=MIB, gradients=MIB, optimizer=MIB, activation_per_token=1000, kv_per_token=10
)
PROBLEM: dict[str, Any] = {"seq_length": 256, "stages": 4, "sequences": 4, "granularity": 32}


def with_memory() -> CostModel:
    return model(stage(memory=MEMORY))


def a_plan(scheme: SliceScheme, *, micro_batches: int = 1, **more: Any) -> Plan:
    whole = SliceScheme([(scheme.sequences, [scheme.seq_length])])
    values: dict[str, Any] = {
        "latency_ms": 8.0,
        "objective": "paper",
        "schedule": "1f1b",
        "stages": 4,
        "granularity": 8,
        "unsliced": Candidate(whole, 10.0, [0.5], [1.0]),
        **more,
    }
    return Plan(scheme=scheme, micro_batches=micro_batches, **values)


def test_paper_latency_by_hand() -> None:
    cost = Formula(lambda length, context, sequences: sequences * (1 + length + context / 2))
    scheme = SliceScheme([(1, [3, 5]), (2, [8])])
    # 4, 1 + 5 + 1.5 and 2 * 9.
    assert paper_latency(cost, scheme, 1) == 29.5
    assert paper_latency(cost, scheme, 4) == 29.5 + 3 * 18
    assert paper_latency(cost, scheme, 4, micro_batches=2) == 59 + 3 * 18


@pytest.mark.parametrize("group", [(1, [64, 64]), (2, [32, 32])])
def test_predict_by_hand(group: tuple[int, list[int]]) -> None:
    """Two slices of 64 tokens on two stages, a message of 1.28 ms and 0.5 ms on the way."""
    costs = StageCost("stage 0", line(1.0, 1 / 64), line(2.0, 2 / 64))
    transfer = Transfer(latency_ms=0.5, ms_per_byte=0.01, bytes_per_token=2.0)
    cost = model(costs, transfer=transfer)
    timeline = predict(cost, SliceScheme([group]), stages=2, schedule="gpipe")
    first, last = ([event.start_ms for event in row] for row in timeline.events)
    assert first == pytest.approx([0, 2, 13.56, 17.56])
    assert last == pytest.approx([3.78, 5.78, 7.78, 11.78])
    assert timeline.makespan_ms == pytest.approx(21.56)


def test_predict_looks_up_stage_group_and_context() -> None:
    cost = model(stage("first", slow=1), stage("middle", slow=2), stage("last", slow=4))
    scheme = SliceScheme([(2, [64, 192]), (1, [256])])
    timeline = predict(cost, scheme, stages=4, schedule="1f1b", micro_batches=2)
    for slow, row in zip((1, 2, 2, 4), timeline.events, strict=True):
        for event in row:
            group = scheme.groups[event.action.micro_batch % 2]
            tokens = group.ranges()[event.action.slice]
            size = group.sequences
            forward = slow * (1 + size * tokens.length / 64 + size * tokens.start / 4096)
            expected = forward if event.action.kind == "F" else 2 * forward
            assert event.stop_ms - event.start_ms == pytest.approx(expected)


def test_a_cost_that_knows_no_forward_apart_has_a_third_of_it() -> None:
    cost = Formula(lambda length, context, sequences: 3 * sequences * length)
    timeline = predict(cost, SliceScheme([(2, [3, 5])]), stages=1, schedule="gpipe")
    times = [event.stop_ms - event.start_ms for event in timeline.events[0]]
    assert times == pytest.approx([6, 10, 20, 12])


def test_weight_gradients_are_a_part_of_the_backward() -> None:
    """Where they are put off; one product over both slices, which the last of them takes."""
    general = Formula(lambda length, context, sequences: 3 * sequences * length)
    half = stage()
    apart = replace(half, weight=line(0.5, 1 / 128))
    scheme = SliceScheme([(2, [64, 192])])
    for cost, weights, joint in (
        (general, [2 * 64, 2 * 192], 2 * 256),
        (model(half), half.backward([64, 192], [0, 64], 2) / 2, half.backward(256, 0, 2) / 2),
        (model(apart), [0.5 + 1, 0.5 + 3], 0.5 + 4),
    ):
        usual, split = (
            predict(cost, scheme, stages=1, schedule=name).events[0] for name in ("1f1b", "zb-h1")
        )
        times = {str(event.action): event.stop_ms - event.start_ms for event in split}
        assert [times["W0.0"], times["W0.1"]] == pytest.approx([joint, 0])
        for event in usual:
            together = times[str(event.action)]
            if event.action.kind == "B":
                together += weights[event.action.slice]
            assert event.stop_ms - event.start_ms == pytest.approx(together)


def test_weight_gradients_apart_from_one_another() -> None:
    """Two micro-batches on three stages: of each run, a product for every micro-batch in it."""
    cost = model(replace(stage(), weight=line(0.5, 1 / 128)))
    timeline = predict(cost, SliceScheme([(1, [128, 256])] * 2), stages=3, schedule="zb-h1")
    found = [
        {
            str(event.action): event.stop_ms - event.start_ms
            for event in events
            if event.action.kind == "W"
        }
        for events in timeline.events
    ]
    assert found[0] == pytest.approx({"W0.1": 2.5, "W0.0": 1.5, "W1.1": 2.5, "W1.0": 1.5})
    assert found[2] == pytest.approx({"W0.1": 2.5, "W0.0": 1.5, "W1.1": 0, "W1.0": 3.5})


def test_peak_memory_is_that_of_the_order() -> None:
    scheme = SliceScheme([(1, [128, 128])])
    step: dict[str, Any] = {"stages": 2, "schedule": "1f1b", "micro_batches": 3}
    # In flight: 3 slices on the first stage, 2 on the last one; on both K and V of two
    # micro-batches, and dK and dV of one.
    first = 3 * MIB + 3 * 128 * 1000 + 3 * 256 * 10
    last = 3 * MIB + 2 * 128 * 1000 + 3 * 256 * 10
    assert peak_memory(with_memory(), scheme, **step) == [first, last]
    assert peak_memory(model(), scheme, **step) is None


@given(
    st.sampled_from(KINDS),
    st.integers(0, 10**6),
    st.sampled_from(["paper", "simulate"]),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_no_plan_is_slower_than_its_rivals(
    kind: str,
    seed: int,
    objective: Any,
    schedule: str,
    stages: int,
    sequences: int,
    micro_batches: int,
) -> None:
    """Scored as promised, and never slower than no slices or the runner-up."""
    cost = random_table(kind, seed, seq_length=14, sequences=sequences)
    step: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches}
    problem = {"seq_length": 14, "sequences": sequences, "granularity": 4, **step}
    found = plan(cost, objective=objective, schedule=schedule, **problem)

    def score(scheme: SliceScheme) -> float:
        if objective == "paper":
            return paper_latency(cost, scheme, **step)
        return predict(cost, scheme, schedule=schedule, **step).makespan_ms

    assert found.latency_ms == score(found.scheme)
    assert found.unsliced.latency_ms == score(found.unsliced.scheme)
    assert max(found.unsliced.scheme.slices) == 1
    assert found.latency_ms <= found.unsliced.latency_ms
    if found.latency_ms:
        assert found.speedup == found.unsliced.latency_ms / found.latency_ms
    assert found.runner_up is not None
    assert found.runner_up.scheme != found.scheme
    assert found.latency_ms <= found.runner_up.latency_ms == score(found.runner_up.scheme)
    for size in range(1, sequences + 1):
        if sequences % size == 0:
            whole = SliceScheme([(size, [14])] * (sequences // size))
            assert found.latency_ms <= found.unsliced.latency_ms <= score(whole)
    if objective == "paper":
        assert found.latency_ms == pytest.approx(solve(cost, **problem).latency_ms)
        assert found.bubble is None
    else:
        timeline = predict(cost, found.scheme, schedule=schedule, **step)
        assert found.bubble == timeline.bubble


def test_a_plan_says_what_it_was_made_for() -> None:
    cost = with_memory()
    found = plan(cost, objective="simulate", schedule="gpipe", micro_batches=2, **PROBLEM)
    assert (found.objective, found.schedule, found.stages) == ("simulate", "gpipe", 4)
    assert (found.micro_batches, found.granularity) == (2, 32)
    assert found.about == {"device": "cpu", "layers": 4}
    step: dict[str, Any] = {"stages": 4, "schedule": "gpipe", "micro_batches": 2}
    assert found.memory == peak_memory(cost, found.scheme, **step)
    assert found.unsliced.memory == peak_memory(cost, found.unsliced.scheme, **step)


def test_simulation_sees_what_the_formula_does_not() -> None:
    """1F1B waits for a round trip with every micro-batch, so that messages' latency adds up."""
    cost = model(transfer=Transfer(latency_ms=50.0))
    formula = plan(cost, objective="paper", **PROBLEM)
    simulated = plan(cost, objective="simulate", **PROBLEM)
    assert len(simulated.scheme) < len(formula.scheme)
    step: dict[str, Any] = {"stages": 4, "schedule": "1f1b"}
    assert simulated.latency_ms < predict(cost, formula.scheme, **step).makespan_ms


def test_of_equals_the_plan_with_fewer_slices() -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    found = plan(cost, seq_length=64, stages=1, sequences=2, granularity=8)
    assert list(found.scheme) == [(2, [64])]
    assert found.speedup == 1


def test_of_equals_without_slices_the_one_with_fewer_groups() -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    found = plan(cost, seq_length=64, stages=1, sequences=2, granularity=8)
    assert found.unsliced.scheme == found.scheme


def test_the_only_plan_has_no_runner_up() -> None:
    found = plan(with_memory(), seq_length=32, stages=4, sequences=1, granularity=32)
    assert list(found.scheme) == [(1, [32])]
    assert found.runner_up is None


@pytest.mark.parametrize("objective", ["paper", "simulate"])
@pytest.mark.parametrize("seq_length", [5, 61, 64])
def test_slices_end_on_the_grid(objective: Any, seq_length: int) -> None:
    """Only what is on the grid is asked for, by the solver and by even cuts."""

    def ms(length: Any, context: Any, sequences: int) -> Any:
        stop = length + context
        assert np.all(context % 8 == 0)
        assert np.all((stop % 8 == 0) | (stop == seq_length))
        return 1.0 + sequences * length

    plan(Formula(ms), seq_length=seq_length, stages=4, sequences=2, objective=objective)


@pytest.mark.parametrize("objective", ["paper", "simulate"])
def test_group_sizes_are_kept(objective: Any) -> None:
    found = plan(model(), objective=objective, group_sizes=[2, 4], **PROBLEM)
    for scheme in (found.scheme, found.unsliced.scheme):
        assert {group.sequences for group in scheme.groups} <= {2, 4}


def test_without_slices_groups_may_differ_too() -> None:
    """Three sequences, whole: 1 + 2 takes 28 + 16 ms, three times 1 takes 36 + 12 ms."""
    whole = {1: 12.0, 2: 16.0, 3: 100.0}

    def ms(length: Any, context: Any, sequences: int) -> Any:
        return length * 0 + 1.0 + (length == 64) * (whole[sequences] - 1.0)

    found = plan(Formula(ms), seq_length=64, stages=2, sequences=3, granularity=8)
    assert found.unsliced.latency_ms == 44


def test_without_slices_there_are_no_slices() -> None:
    """Five sequences in groups of 2 and 3."""
    problem = {**PROBLEM, "sequences": 5}
    found = plan(model(), group_sizes=[2, 3], **problem)
    assert max(found.unsliced.scheme.slices) == 1


def test_for_deepspeed_makes_micro_batches_of_what_repeats() -> None:
    sixteen = a_plan(SliceScheme([(1, [776, 640, 632])] * 16))
    assert sixteen.for_deepspeed() == (1, 16, SliceScheme([(1, [776, 640, 632])]))


def test_for_deepspeed_keeps_the_mixture() -> None:
    mixed = a_plan(SliceScheme([(1, [4, 4]), (2, [8]), (2, [8]), (1, [4, 4]), (2, [8]), (2, [8])]))
    assert mixed.for_deepspeed() == (5, 2, SliceScheme([(1, [4, 4]), (2, [8]), (2, [8])]))
    thirds = a_plan(SliceScheme([(1, [4, 4])] * 4 + [(2, [8])] * 6))
    assert thirds.for_deepspeed() == (8, 2, SliceScheme([(1, [4, 4])] * 2 + [(2, [8])] * 3))
    once = a_plan(SliceScheme([(1, [4, 4])] * 2 + [(1, [8])]))
    assert once.for_deepspeed() == (3, 1, once.scheme)


def test_for_deepspeed_leaves_given_micro_batches_alone() -> None:
    given = a_plan(SliceScheme([(1, [4, 4])] * 2), micro_batches=3)
    assert given.for_deepspeed() == (2, 3, given.scheme)


def test_slack_is_chosen_where_it_gains() -> None:
    """Even slices of unequal times, of which there are no others on this grid."""
    given: dict[str, Any] = {
        "seq_length": 64,
        "stages": 4,
        "sequences": 1,
        "micro_batches": 8,
        "granularity": 32,
        "objective": "simulate",
    }
    cost = Formula(lambda length, context, _: length * (1 + 0.1 * (context + length / 2)))
    tight = plan(cost, **given)
    chosen = plan(cost, **given, warmup="auto")
    assert tight.warmup == 0 and chosen.warmup > 0
    assert chosen.latency_ms < tight.latency_ms
    assert chosen.latency_ms == plan(cost, **given, warmup=chosen.warmup).latency_ms
    with_more = plan(cost, **given, warmup=chosen.warmup + 8)
    assert with_more.latency_ms > 0.99 * chosen.latency_ms, "more would be a waste of memory"
    simulated = predict(
        cost,
        chosen.scheme,
        stages=4,
        schedule="1f1b",
        micro_batches=8,
        warmup=chosen.warmup,
    )
    assert simulated.makespan_ms == chosen.latency_ms
    assert plan(cost, **given, schedule="gpipe", warmup="auto").warmup == 0


def test_slack_keeps_to_the_memory() -> None:
    given: dict[str, Any] = {
        **PROBLEM,
        "sequences": 1,
        "micro_batches": 8,
        "objective": "simulate",
        "schedule": "zb-h1",
    }
    # As with long sequences: attention has no part in the weights' gradients.
    cost = model(replace(stage(memory=MEMORY), weight=line(0.25, 1 / 256)))
    free = plan(cost, **given, warmup="auto")
    assert free.warmup > 0 and free.memory is not None
    limit = max(free.memory) - 1
    tight = plan(cost, **given, warmup="auto", memory_bytes=limit)
    assert tight.memory is not None and max(tight.memory) <= limit


def test_a_plan_must_save_the_least_gain() -> None:
    sliced = plan(model(), **PROBLEM)
    gain = 1 - 1 / sliced.speedup
    assert gain > 0.05
    assert plan(model(), least_gain=gain - 0.01, **PROBLEM) == sliced
    whole = plan(model(), least_gain=gain + 0.01, **PROBLEM)
    assert whole.scheme == sliced.unsliced.scheme
    assert whole.latency_ms == sliced.unsliced.latency_ms
    assert whole.runner_up is not None
    assert whole.runner_up.scheme == sliced.scheme
    assert whole.speedup == 1


def test_a_plan_is_not_its_own_runner_up() -> None:
    cost = Formula(lambda length, context, sequences: 10.0 + 0 * length)
    found = plan(cost, least_gain=0.02, **PROBLEM)
    assert max(found.scheme.slices) == 1
    assert found.runner_up is not None
    assert found.runner_up.scheme != found.scheme


def test_a_memory_limit_drops_plans() -> None:
    cost = with_memory()
    free = plan(cost, **PROBLEM)
    assert free.memory is not None
    limit = max(free.memory) - 1
    bounded = plan(cost, memory_bytes=limit, **PROBLEM)
    assert bounded.memory is not None
    assert bounded.scheme != free.scheme
    assert max(bounded.memory) <= limit
    assert bounded.latency_ms >= free.latency_ms
    runner_up = bounded.runner_up
    assert runner_up is None or max(runner_up.memory or []) <= limit
    assert plan(cost, memory_bytes=max(free.memory), **PROBLEM).scheme == free.scheme


@pytest.mark.parametrize("objective", ["paper", "simulate"])
def test_says_what_the_leanest_plan_needs(objective: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(with_memory(), objective=objective, memory_bytes=MIB, **PROBLEM)
    message = str(caught.value)
    assert message.startswith("plan: found no plan that fits in 0.00 GiB, the leanest ([(")
    assert message.endswith(
        ") needs 0.00 GiB; raise --memory (terapipe.memory_gib), use more stages, ZeRO-1 or "
        "activation checkpointing"
    )
    assert "\n" not in message


def test_the_least_gain_does_not_break_the_memory_limit() -> None:
    """Without slices more is in flight than fits."""
    cost = with_memory()
    whole = plan(cost, **PROBLEM).unsliced
    assert whole.memory is not None
    limit = max(whole.memory) - 1
    found = plan(cost, memory_bytes=limit, least_gain=0.99, **PROBLEM)
    assert found.memory is not None
    assert max(found.memory) <= limit


def test_a_memory_limit_needs_known_memory() -> None:
    half_known = model(stage(memory=MEMORY), stage("stage 1"))
    table = random_table("uniform", 0, seq_length=8, sequences=1)
    for cost in (model(), half_known, table):
        with pytest.raises(ConfigError, match="found a memory limit for costs that do not say"):
            plan(cost, seq_length=8, stages=2, sequences=1, memory_bytes=1e9)


def saved(tmp_path: Path, **more: Any) -> tuple[Plan, Path]:
    found = plan(with_memory(), **{**PROBLEM, **more})
    path = tmp_path / "new" / "plan.json"
    found.save(path)
    return found, path


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"objective": "simulate", "schedule": "gpipe", "micro_batches": 2},
        {"sequences": 1, "seq_length": 32},
        {"schedule": "zb-h1", "micro_batches": 4, "objective": "simulate", "warmup": "auto"},
    ],
)
def test_round_trip(tmp_path: Path, more: dict[str, Any]) -> None:
    found, path = saved(tmp_path, **more)
    assert Plan.load(path) == Plan.load(str(path)) == found
    assert Plan.from_dict(found.to_dict()) == found
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]
    content = json.loads(path.read_text())
    assert (content["schema"], content["version"]) == ("terapipe-plan", 1)
    assert content["scheme"] == [[size, lengths] for size, lengths in found.scheme]


def load_refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith("plan: found ")
    assert "terapipe plan --out" in message
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"", b'{"schema":', b"\xff\xfe\x00"])
def test_refuses_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert "which cannot be read" in load_refusal(path)


def test_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "which cannot be read" in load_refusal(tmp_path / "plan.json")
    assert "which cannot be read" in load_refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"schema": "terapipe-cost"}, "('terapipe-cost', 1)"),
        ({"version": 2}, "('terapipe-plan', 2)"),
        ({"version": None}, "('terapipe-plan', None)"),
    ],
)
def test_refuses_another_schema(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    _, path = saved(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert f"found schema {found} in {path}, allowed is ('terapipe-plan', 1)" in load_refusal(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"plan"', "{}"])
def test_refuses_what_is_no_plan(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert "found schema (" in load_refusal(path)


@pytest.mark.parametrize("part", ["scheme", "latency_ms", "objective", "stages", "unsliced"])
def test_refuses_a_plan_without_a_part(tmp_path: Path, part: str) -> None:
    _, path = saved(tmp_path)
    content = json.loads(path.read_text())
    del content[part]
    path.write_text(json.dumps(content))
    message = load_refusal(path)
    assert "a part that is missing or wrong" in message
    assert part in message


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("scheme", [[1, [0]]]),
        ("scheme", "[(1, [8])]"),
        ("unsliced", 3),
        ("unsliced", {}),
        ("runner_up", {"scheme": [[1, [8]]]}),
        ("colour", "blue"),
    ],
)
def test_refuses_a_wrong_part(part: str, value: Any) -> None:
    content = a_plan(SliceScheme([(1, [4, 4])])).to_dict()
    with pytest.raises(ConfigError) as caught:
        Plan.from_dict({**content, part: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "value"),
    [("unsliced", "none"), ("unsliced", None), ("latency_ms", "fast"), ("objective", "fun")],
)
def test_refuses_a_part_of_another_type(part: str, value: Any) -> None:
    test_refuses_a_wrong_part(part, value)


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(changes.pop("cost", model()), **{**PROBLEM, **changes})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
@pytest.mark.parametrize(
    "name", ["seq_length", "stages", "sequences", "granularity", "micro_batches"]
)
def test_refuses_numbers(name: str, value: Any) -> None:
    expected = f"plan: found {name} {value!r}, allowed are integers of at least 1; change {name}"
    assert refusal(**{name: value}) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "fun"}, "plan: found objective 'fun', allowed are 'paper', 'simulate'"),
        ({"epsilon": -1.0}, "plan: found epsilon -1.0, allowed is a time of at least 0 ms"),
        ({"epsilon": math.nan}, "plan: found epsilon nan"),
        ({"epsilon": math.inf}, "plan: found epsilon inf"),
        ({"schedule": "zigzag", "objective": "simulate"}, "schedule: found 'zigzag'"),
        ({"seq_length": 512}, "cost: found measurements up to 256 tokens for sequences of 512"),
        ({"group_sizes": [3]}, "plan: found group sizes that cannot cover 4 sequences"),
        ({"group_sizes": []}, "plan: found group sizes that cannot cover 4 sequences"),
        ({"cost": model(stage(), stage())}, "cost: found costs of 2 stages for a pipeline of 4"),
        (
            {"cost": Formula(lambda length, context, sequences: -length)},
            "plan: found times of -256.0 to -32.0 ms for 1 sequences",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes).startswith(message)


@pytest.mark.parametrize("sizes", [[0, 1], [-1, 1], [1.0]])
def test_refuses_group_sizes(sizes: list[Any]) -> None:
    message = refusal(group_sizes=sizes)
    assert message.startswith("plan: ")
    assert "group" in message


def test_refuses_an_unknown_schedule_for_the_formula() -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    assert "found 'zigzag'" in refusal(cost=cost, schedule="zigzag")


def test_the_planner_loads_neither_torch_nor_deepspeed() -> None:
    program = (
        "import sys, terapipe_ds.planner\n"
        "print(sorted({'torch', 'deepspeed', 'megatron'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
