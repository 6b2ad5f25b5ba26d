"""Plans in DeepSpeed JSONs: what is set, what is refused, and every other character as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.config import read_block
from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import Candidate, Plan
from terapipe_ds.planner.inject import inject
from terapipe_ds.scheme import SliceScheme

MICRO_BATCH = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCH = "train_batch_size"
BLOCK = "terapipe"


def a_plan(scheme: Any, *, micro_batches: int = 1, schedule: str = "1f1b", warmup: int = 0) -> Plan:
    groups = scheme if isinstance(scheme, SliceScheme) else SliceScheme(scheme)
    return Plan(
        scheme=groups,
        latency_ms=8.0,
        objective="simulate",
        schedule=schedule,
        stages=2,
        micro_batches=micro_batches,
        granularity=8,
        unsliced=Candidate(groups, 10.0),
        warmup=warmup,
    )


# Four sequences a step: twice a micro-batch of two.
PLAN = a_plan([(2, [40, 24])] * 2)


def test_an_empty_object() -> None:
    text, changes = inject(PLAN, "{}\n")
    assert text.endswith("}\n")
    assert json.loads(text) == {
        MICRO_BATCH: 2,
        STEPS: 2,
        BLOCK: {"slices": [40, 24], "schedule": "1f1b"},
    }
    assert changes == [
        f"{MICRO_BATCH}: not set -> 2",
        f"{STEPS}: not set -> 2",
        f'{BLOCK}: not set -> {{"slices": [40, 24], "schedule": "1f1b"}}',
    ]


def test_one_line() -> None:
    text, _ = inject(PLAN, '{ "steps_per_print": 10, "fp16":{"enabled" :false} }')
    assert text == (
        '{ "steps_per_print": 10, "fp16":{"enabled" :false}, '
        f'"{MICRO_BATCH}": 2, "{STEPS}": 2, '
        f'"{BLOCK}": {{"slices": [40, 24], "schedule": "1f1b"}} }}'
    )


def test_an_indented_file() -> None:
    text, _ = inject(PLAN, '{\n\t"lr": 1E-8 ,\n\t"train_batch_size" : 16\n}\n\n')
    assert text == (
        '{\n\t"lr": 1E-8 ,\n\t"train_batch_size" : 16,\n'
        f'\t"{MICRO_BATCH}": 2,\n\t"{STEPS}": 2,\n'
        f'\t"{BLOCK}": {{\n\t\t"slices": [40, 24],\n\t\t"schedule": "1f1b"\n\t}}\n'
        "}\n\n"
    )


def test_a_block_keeps_its_other_keys() -> None:
    text, changes = inject(
        PLAN,
        f'{{\n  "{BLOCK}": {{\n    "timeout_s": 6e1,\n    "slices": "auto"\n  }},\n'
        f'  "{STEPS}": 2,\n  "{MICRO_BATCH}": 2\n}}',
    )
    assert text == (
        f'{{\n  "{BLOCK}": {{\n    "timeout_s": 6e1,\n    "slices": [40, 24],\n'
        f'    "schedule": "1f1b"\n  }},\n  "{STEPS}": 2,\n  "{MICRO_BATCH}": 2\n}}'
    )
    assert changes == [
        f'{BLOCK}: {{"timeout_s": 60.0, "slices": "auto"}} -> '
        '{"timeout_s": 60.0, "slices": [40, 24], "schedule": "1f1b"}'
    ]
    block = read_block(json.loads(text))
    assert block is not None
    assert (block.timeout_s, block.slices) == (60.0, (40, 24))


@pytest.mark.parametrize("value", ["null", '"auto"', "[]", "true"])
def test_a_block_that_is_no_object_is_replaced(value: str) -> None:
    text, _ = inject(PLAN, f'{{"{BLOCK}":{value}}}')
    assert json.loads(text)[BLOCK] == {"slices": [40, 24], "schedule": "1f1b"}


def test_a_key_inside_another_object_is_not_meant() -> None:
    inner = f'"x": {{"{BLOCK}": 1, "{STEPS}": 9, "{BATCH}": 7}}'
    text, _ = inject(PLAN, f"{{{inner}}}")
    assert text.startswith(f'{{{inner}, "{MICRO_BATCH}": 2,')


def test_names_written_with_escapes_are_found() -> None:
    text, _ = inject(PLAN, r'{"tera\u0070ipe": {"sl\u0069ces": 4}, "a": "\"}{"}')
    written = r'{"tera\u0070ipe": {"sl\u0069ces": [40, 24],"schedule": "1f1b"}, "a": "\"}{", '
    assert text.replace(" ", "").startswith(written.replace(" ", ""))


def test_auto_is_filled_in() -> None:
    before = f'{{"{BATCH}": "auto", "{MICRO_BATCH}": "auto", "{STEPS}": "auto"}}'
    text, changes = inject(PLAN, before)
    after = json.loads(text)
    assert (after[BATCH], after[MICRO_BATCH], after[STEPS]) == ("auto", 2, 2)
    assert changes[:2] == [f'{MICRO_BATCH}: "auto" -> 2', f'{STEPS}: "auto" -> 2']
    assert not any(line.startswith("note") for line in changes)


@pytest.mark.parametrize(
    ("plan", "slices", "size", "steps"),
    [
        (a_plan([(1, [40, 24])] * 16), [40, 24], 1, 16),
        (a_plan([(3, [64])]), [64], 3, 1),
        (a_plan([(2, [40, 24])], micro_batches=4), [40, 24], 2, 4),
        (
            a_plan([(2, [64])] * 2 + [(1, [40, 24])] * 2),
            "[(2, [64])] + [(1, [40, 24])]",
            3,
            2,
        ),
        (
            a_plan([(2, [64]), (1, [40, 24]), (1, [40, 24])]),
            "[(2, [64])] + [(1, [40, 24])] * 2",
            4,
            1,
        ),
        (a_plan([(1, [40, 24])] * 2, micro_batches=3), "[(1, [40, 24])] * 2", 2, 3),
    ],
)
def test_batch_sizes_and_the_form_of_slices(plan: Plan, slices: Any, size: int, steps: int) -> None:
    """One group is a list, several are text; groups that repeat become micro-batches."""
    after = json.loads(inject(plan, "{}")[0])
    assert after == {
        MICRO_BATCH: size,
        STEPS: steps,
        BLOCK: {"slices": slices, "schedule": "1f1b"},
    }
    block = read_block(after)
    assert block is not None and block.slices != "auto"
    scheme = SliceScheme.resolve(block.slices, sequences=size, seq_length=64)
    assert scheme == plan.for_deepspeed()[2]


@pytest.mark.parametrize(
    ("before", "warmup", "after"),
    [("", 0, "auto"), ("", 3, 3), ('"warmup": "auto"', 2, 2), ('"warmup": 5', 0, 0)],
)
def test_the_warmup_is_the_plans(before: str, warmup: int, after: int | str) -> None:
    text = f'{{"{BLOCK}": {{{before}}}}}'
    block = read_block(json.loads(inject(a_plan([(1, [64])], warmup=warmup), text)[0]))
    assert block is not None
    assert block.warmup == after
    assert block.given_warmup == warmup


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_schedule_is_the_plans(schedule: str) -> None:
    before = f'{{"{BLOCK}": {{"schedule": "1f1b"}}}}'
    block = read_block(json.loads(inject(a_plan([(1, [64])], schedule=schedule), before)[0]))
    assert block is not None
    assert block.schedule == schedule


@pytest.mark.parametrize(
    "batch_sizes",
    [
        {},
        {MICRO_BATCH: 2, STEPS: 2},
        {MICRO_BATCH: 1, STEPS: 4},
        {MICRO_BATCH: 4},
        {MICRO_BATCH: 4, STEPS: "auto"},
        {MICRO_BATCH: None, STEPS: None, BATCH: None},
        {BATCH: 4},
        {BATCH: 32},
        {BATCH: 32, MICRO_BATCH: 2},
        {BATCH: 32, MICRO_BATCH: 1, STEPS: 4},
        {BATCH: "auto", MICRO_BATCH: 4, STEPS: 1},
    ],
    ids=json.dumps,
)
def test_batch_sizes_that_agree(batch_sizes: dict[str, Any]) -> None:
    text, changes = inject(PLAN, json.dumps(batch_sizes))
    after = json.loads(text)
    assert {**after, BLOCK: 0} == {**batch_sizes, MICRO_BATCH: 2, STEPS: 2, BLOCK: 0}
    changed = {line.split(":")[0] for line in changes} - {"note"}
    assert changed == {name for name in after if batch_sizes.get(name) != after[name]}
    # Another size of micro-batches weighs tokens in another way, where a loss mask is uneven.
    noted = [line for line in changes if line.startswith("note: DeepSpeed averages")]
    assert len(noted) == (batch_sizes.get(MICRO_BATCH) in (1, 4))


@pytest.mark.parametrize(
    ("batch_sizes", "says"),
    [
        (
            {MICRO_BATCH: 2, STEPS: 4},
            f"inject: found {MICRO_BATCH} 2 and {STEPS} 4, 8 sequences a step and replica, allowed "
            "are 4, which the plan covers; plan again with --sequences, or change these",
        ),
        (
            {MICRO_BATCH: 2},
            f"inject: found {MICRO_BATCH} 2 and {STEPS} not set, 2 sequences a step and replica, "
            "allowed are 4, which the plan covers; plan again with --sequences, or change these",
        ),
        ({MICRO_BATCH: 3, STEPS: "auto"}, f"{MICRO_BATCH} 3 and {STEPS} not set, 3 sequences"),
        ({BATCH: 32, MICRO_BATCH: 1, STEPS: 2}, "2 sequences a step and replica, allowed are 4"),
        ({BATCH: 30, MICRO_BATCH: 2}, "found train_micro_batch_size_per_gpu 2"),
        (
            {BATCH: 30},
            f"inject: found {BATCH} 30, allowed is a multiple of 4, the sequences a step and "
            f"replica that the plan covers; plan again with --sequences, or change {BATCH}",
        ),
        ({BATCH: 2, STEPS: 1}, f"found {BATCH} 2, allowed is a multiple of 4"),
        ({BATCH: 6, MICRO_BATCH: 2, STEPS: 2}, f"found {BATCH} 6, allowed is a multiple of 4"),
    ],
    ids=str,
)
def test_batch_sizes_that_contradict_the_plan(batch_sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(PLAN, json.dumps(batch_sizes))
    message = str(caught.value)
    assert says in message
    assert message.startswith("inject: ") and "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found a file that is not JSON"),
        ("{", "found a file that is not JSON"),
        ('{"a": 1,}', "found a file that is not JSON"),
        ('{"a": 1 // one\n}', "as plain JSON, without comments"),
        ("[]", "found list in the file, allowed is a JSON object"),
        ('"{}"', "found str in the file"),
        ("null", "found NoneType in the file"),
        ('{"a": 1, "b": 2, "a": 1}', "found 'a' twice in the file, allowed is once"),
        (f'{{"{BLOCK}": {{}}, "{BLOCK}": {{}}}}', f"found '{BLOCK}' twice"),
        (f'{{"{BLOCK}": {{"x": 1, "x": 2}}}}', "found 'x' twice"),
    ],
)
def test_text_that_is_no_configuration(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(PLAN, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Written:
    """A JSON value, and one of the many ways to write it; an object with its members apart."""

    value: Any
    text: str
    members: tuple[tuple[str, str, Written], ...] = ()
    """For each member what stands between the value before and its own, its name, its value."""
    tail: str = ""
    """From the last value to the end."""


class Writer:
    """Writes JSON as no tool and no human would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.spaces = rng.choice([("",), (" ",), ("", " ", "\n", "\t", "\r\n  ", "\n    ")])

    def write(self, value: Any, *, indent: str | None = None) -> Written:
        if isinstance(value, Mapping):
            return self.object(value, indent)
        if isinstance(value, Sequence) and not isinstance(value, str):
            texts = [self.space() + self.write(each).text + self.space() for each in value]
            return Written(value, "[" + (",".join(texts) or self.space()) + "]")
        if isinstance(value, float):
            return Written(value, self.number(value))
        text = json.dumps(value, ensure_ascii=self.rng.random() < 0.5)
        return Written(value, text)

    def object(self, value: Mapping[str, Any], indent: str | None) -> Written:
        """With ``indent``, each member on a line of its own behind it."""
        members = []
        before = ""
        for name, each in value.items():
            before += self.space() if indent is None else "\n" + indent
            before += json.dumps(name, ensure_ascii=self.rng.random() < 0.5)
            before += self.space() + ":" + self.space()
            members.append((before, name, self.write(each)))
            before = self.space() + ","
        tail = (self.space() if indent is None else "\n") + "}"
        text = "{" + "".join(before + each.text for before, _, each in members) + tail
        return Written(value, text, tuple(members), tail)

    def space(self) -> str:
        return self.rng.choice(self.spaces)

    def number(self, value: float) -> str:
        spellings = [repr(value), f"{value:.3e}", f"{value:.17E}", f"{value:.2f}", f"{value:.3f}0"]
        return self.rng.choice([text for text in spellings if float(text) == value])


def check_edit(before: Written, after: str, at: int, wanted: Mapping[str, Any]) -> int:
    """Follows an object in the new text from ``at``; returns where it ends.

    ``wanted`` are its members that change, as values or, for an object that is edited in turn, as
    its own ``wanted``. Everything else has to be there, character by character.
    """
    decoder = json.JSONDecoder()
    assert after[at] == "{"
    at += 1
    for lead, name, value in before.members:
        assert after.startswith(lead, at)
        at += len(lead)
        if name not in wanted:
            assert after.startswith(value.text, at)
            at += len(value.text)
        elif isinstance(value.value, Mapping):
            at = check_edit(value, after, at, wanted[name])
        else:
            found, at = decoder.raw_decode(after, at)
            assert found == wanted[name]
    new = {name: value for name, value in wanted.items() if name not in before.value}
    if not new:
        assert after.startswith(before.tail, at)
        return at + len(before.tail)
    if before.members:
        comma = after.index(",", at)
        assert after[at:comma].strip() == ""
        at = comma + 1
    found, length = decoder.raw_decode("{" + after[at:])
    assert list(found.items()) == list(new.items())
    stop = at + length - 1
    assert after.endswith(before.tail, at, stop)
    return stop


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.sampled_from([1e-3, 1e-8, 1.5, 0.0, -2.0, 5e20, 0.1]) | st.integers(-9, 10**20)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
OTHERS = st.dictionaries(WORDS | st.sampled_from(["optimizer", "bf16", "slices"]), VALUES)


@st.composite
def configurations(draw: st.DrawFn, plan: Plan) -> dict[str, Any]:
    """A DeepSpeed configuration that does not contradict the plan, its members in any order."""
    size, steps, _ = plan.for_deepspeed()
    covered = size * steps
    agreeing: list[dict[str, Any]] = [
        {},
        {MICRO_BATCH: size},
        {MICRO_BATCH: size, STEPS: steps},
        {MICRO_BATCH: 1, STEPS: covered},
        {MICRO_BATCH: "auto", STEPS: "auto", BATCH: "auto"},
        {STEPS: None},
        {BATCH: 3 * covered, STEPS: 1},
        {BATCH: covered, MICRO_BATCH: size},
    ]
    if steps > 1:
        # Without steps there is one.
        agreeing[1] = {MICRO_BATCH: covered}
    block = draw(
        st.sampled_from([None, {}, {"slices": "auto"}, {"schedule": "gpipe", "slices": [8, 8]}])
    )
    members = {**draw(OTHERS), **draw(st.sampled_from(agreeing))}
    if block is not None:
        more = draw(st.dictionaries(st.sampled_from(["timeout_s", "loss", "x"]), VALUES))
        members[BLOCK] = dict(draw(st.permutations(list({**block, **more}.items()))))
    return dict(draw(st.permutations(list(members.items()))))


PLANS = st.sampled_from(
    [
        PLAN,
        a_plan([(1, [64])]),
        a_plan([(2, [64]), (1, [40, 24])], schedule="gpipe"),
        a_plan([(3, [8] * 8)], micro_batches=2, schedule="zb-h1"),
    ]
)


@given(data=st.data(), plan=PLANS, seed=st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_nothing_else_changes(data: st.DataObject, plan: Plan, seed: int) -> None:
    old = data.draw(configurations(plan))
    rng = random.Random(seed)
    before = Writer(rng).write(old, indent=rng.choice([None, "  ", "    ", "\t"]))
    around = rng.choice(["", "\n", " \t"]), rng.choice(["", "\n", "\n\n  "])
    assert json.loads(before.text) == old

    after, changes = inject(plan, around[0] + before.text + around[1])

    size, steps, scheme = plan.for_deepspeed()
    several = len(scheme.groups) > 1
    block = {
        "slices": str(scheme) if several else list(scheme.groups[0].lengths),
        "schedule": plan.schedule,
    }
    new = {**old, MICRO_BATCH: size, STEPS: steps, BLOCK: {**old.get(BLOCK, {}), **block}}
    assert json.loads(after) == new
    wanted = {MICRO_BATCH: size, STEPS: steps, BLOCK: block}
    start, stop = len(around[0]), len(after) - len(around[1])
    assert check_edit(before, after, start, wanted) == stop
    assert (after[:start], after[stop:]) == around
    named = {line.split(":")[0] for line in changes} - {"note"}
    assert named == {name for name in wanted if old.get(name) != new[name]}

    again, nothing = inject(plan, after)
    assert nothing == []
    assert again == after
