"""The checker: every rule refuses an order that breaks it, and shows where."""

from __future__ import annotations

import pytest

from terapipe_ds.errors import ScheduleError
from terapipe_ds.schedule import Action, Order, actions, check, check_named, grid


def order_of(*rows: str) -> Order:
    """An order from its text, for example ``"F0.0 B0.0"`` for each stage."""
    return [
        [Action(cell[0], *map(int, cell[1:].split("."))) for cell in row.split()]  # type: ignore[arg-type]
        for row in rows
    ]


def refusal(
    order: Order, micro_batches: int, slices: int, bounds: list[int] | None = None
) -> list[str]:
    """The lines of the message."""
    with pytest.raises(ScheduleError) as caught:
        check(order, micro_batches=micro_batches, slices=slices, bounds=bounds)
    return str(caught.value).splitlines()


GOOD = "F0.0 F0.1 B0.1 B0.0"


def test_accepts_a_legal_order() -> None:
    check(order_of(GOOD, GOOD), micro_batches=1, slices=2, bounds=[2, 2])


@pytest.mark.parametrize(
    ("bad", "step", "marked", "reason"),
    [
        ("F0.0 B0.1 F0.1 B0.0", 1, ">B0.1<", "B0.1 runs before F0.1"),
        ("F0.0 F0.0 B0.1 B0.0", 1, ">F0.0<", "F0.0 runs twice"),
        ("F0.0 F0.1 B0.1 B0.1", 3, ">B0.1<", "B0.1 runs twice"),
        ("F0.0 F0.2 B0.2 B0.0", 1, ">F0.2<", "F0.2 is not a slice of this batch"),
        ("F0.0 F1.0 B1.0 B0.0", 1, ">F1.0<", "F1.0 is not a slice of this batch"),
        ("F0.0 F0.1 X0.1 B0.0", 2, ">X0.1<", "'X' is not a kind of action"),
        ("F0.0 F0.1 W0.1 B0.1 B0.0", 2, ">W0.1<", "W0.1 runs before B0.1"),
        ("F0.1 F0.0 B0.1 B0.0", 1, ">F0.0<", "F must ascend within a micro-batch"),
        ("F0.0 F0.1 B0.0 B0.1", 3, ">B0.1<", "B must descend within a micro-batch"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_rules_1_and_2(stage: int, bad: str, step: int, marked: str, reason: str) -> None:
    rows = [GOOD, GOOD]
    rows[stage] = bad
    head, *shown = refusal(order_of(*rows), 1, 2)
    assert head == f"stage {stage}, step {step}: {reason}"
    assert shown[stage].split("|")[1].split()[step] == marked
    assert "\n".join(shown).count(">") == 1


@pytest.mark.parametrize(
    ("bad", "missing"), [("F0.0 F0.1 B0.1", "B0.0"), ("F0.0 B0.0", "B0.1"), ("F0.0 F0.1", "B0.0")]
)
def test_rule_1_names_what_never_runs(bad: str, missing: str) -> None:
    order = order_of(GOOD, bad)
    assert refusal(order, 1, 2) == [f"stage 1: {missing} never runs", *grid(order).splitlines()]


def test_rule_1_without_training_needs_forwards_only() -> None:
    check(order_of("F0.0 F0.1"), micro_batches=1, slices=2)
    assert refusal(order_of("F0.0"), 1, 2)[0] == "stage 0: F0.1 never runs"


def test_rule_3_neighbours_run_forwards_in_one_order() -> None:
    head, *shown = refusal(order_of("F0.0 F1.0 B1.0 B0.0", "F1.0 F0.0 B1.0 B0.0"), 2, 1)
    assert head == "stage 1, step 0: stage 0 has F0.0 at this place"
    assert shown == ["stage  0 | F0.0  F1.0  B1.0  B0.0", "stage  1 |>F1.0< F0.0  B1.0  B0.0"]


def test_rule_3_neighbours_run_backwards_in_one_order() -> None:
    head, *shown = refusal(order_of("F0.0 F1.0 B1.0 B0.0", "F0.0 F1.0 B0.0 B1.0"), 2, 1)
    assert head == "stage 1, step 2: stage 0 has B1.0 at this place"
    assert shown[1] == "stage  1 | F0.0  F1.0 >B0.0< B1.0"


def test_rule_4_deadlock() -> None:
    """Stage 0 waits for B0 before it sends F1, and stage 1 for F1 before it sends B0."""
    head, *shown = refusal(order_of("F0.0 B0.0 F1.0 B1.0", "F0.0 F1.0 B0.0 B1.0"), 2, 1)
    assert head == "stage 0, step 1: deadlock, it waits for stage 1 for ever"
    assert shown == ["stage  0 | F0.0 >B0.0< F1.0  B1.0", "stage  1 | F0.0  F1.0  B0.0  B1.0"]


def test_rule_4_a_stage_may_run_behind() -> None:
    check(order_of("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0"), micro_batches=2, slices=1)


def test_rule_5_in_flight_bound() -> None:
    order = order_of(GOOD, GOOD)
    head, *shown = refusal(order, 1, 2, bounds=[2, 1])
    assert head == "stage 1, step 1: 2 slices in flight, the bound is 1"
    assert shown[1] == "stage  1 | F0.0 >F0.1< B0.1  B0.0"


def test_rule_5_with_the_bound_of_a_named_schedule() -> None:
    order = actions("gpipe", 2, 3, 2)
    check_named("gpipe", order, micro_batches=3, slices=2)
    with pytest.raises(ScheduleError, match="stage 0, step 3: 4 slices in flight, the bound is 3"):
        check_named("1f1b", order, micro_batches=3, slices=2)


def test_grid() -> None:
    order = order_of("F0.0 F0.1 B0.1 B0.0", "F0.0")
    assert grid(order) == "stage  0 | F0.0  F0.1  B0.1  B0.0\nstage  1 | F0.0"
    assert grid(order, (0, 2)) == "stage  0 | F0.0  F0.1 >B0.1< B0.0\nstage  1 | F0.0"


def test_grid_columns_are_as_wide_as_the_widest_cell() -> None:
    assert grid(order_of("F0.9 F0.10 B0.10", "F10.10 F0.9")) == (
        "stage  0 | F0.9    F0.10   B0.10\nstage  1 | F10.10  F0.9"
    )


def test_refuses_no_stages_and_missing_bounds() -> None:
    with pytest.raises(ScheduleError, match="found 0 stages"):
        check([], micro_batches=1, slices=1)
    order = actions("gpipe", 2, 1, 1)
    with pytest.raises(ScheduleError, match=r"found 2 stages and \[1\] as bounds"):
        check(order, micro_batches=1, slices=1, bounds=[1])


def test_takes_plain_tuples() -> None:
    check([[("F", 0, 0), ("B", 0, 0)]], micro_batches=1, slices=1)
