"""The "terapipe" block: defaults, every form of slices, and one-line refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfig, read_block
from terapipe_ds.errors import ConfigError
from terapipe_ds.scheme import SliceScheme

SCHEME = [[2, [5, 3]], [1, [8]]]


def block(**keys: Any) -> TeraPipeConfig:
    config = read_block({"train_batch_size": 8, "terapipe": keys})
    assert config is not None
    return config


def test_absent_block_is_none() -> None:
    assert read_block({}) is None
    assert read_block({"train_batch_size": 8}) is None


def test_defaults() -> None:
    assert block().model_dump() == {
        "enabled": True,
        "slices": "auto",
        "schedule": "1f1b",
        "warmup": "auto",
        "loss": "auto",
        "granularity": 8,
        "replan": False,
        "profile_budget_s": 120.0,
        "memory_gib": None,
        "trace": None,
        "trace_steps": [2],
        "timeout_s": 1800.0,
    }


def test_every_key_is_read() -> None:
    given = {
        "enabled": False,
        "slices": 4,
        "schedule": "zb-h1",
        "warmup": 2,
        "loss": "whole_sequence",
        "granularity": 16,
        "replan": True,
        "profile_budget_s": 10.5,
        "memory_gib": 75.0,
        "trace": "traces",
        "trace_steps": [0, 7],
        "timeout_s": 2.5,
    }
    assert block(**given).model_dump() == given


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ("auto", "auto"),
        (1, 1),
        (4, 4),
        ([776, 640, 632], (776, 640, 632)),
        ([8], (8,)),
        (SCHEME, SliceScheme([(2, [5, 3]), (1, [8])])),
        ("[(1, [5, 3])] * 2 + [(1, [8])]", SliceScheme([(1, [5, 3]), (1, [5, 3]), (1, [8])])),
    ],
)
def test_forms_of_slices(slices: Any, expected: Any) -> None:
    read = block(slices=slices).slices
    assert read == expected
    assert type(read) is type(expected)


def test_block_is_frozen() -> None:
    config = block(slices=4)
    with pytest.raises(ValueError, match="frozen"):
        config.slices = 8
    assert config.slices == 4


LENGTHS = 'allowed are "auto", a number of slices, a list of slice lengths, or groups'


@pytest.mark.parametrize(
    ("keys", "key", "found", "allowed"),
    [
        (
            {"slcies": 4},
            "slcies",
            "found an unknown key",
            "allowed are enabled, granularity, loss, memory_gib, profile_budget_s, replan, "
            "schedule, slices, timeout_s, trace, trace_steps, "
            "warmup",
        ),
        (
            {"schedule": "zigzag"},
            "schedule",
            'found "zigzag"',
            "allowed is '1f1b', 'gpipe' or 'zb-h1'",
        ),
        ({"warmup": -1}, "warmup", "found -1", '"auto" and integers of at least 0'),
        ({"warmup": True}, "warmup", "found True", '"auto" and integers of at least 0'),
        ({"warmup": "none"}, "warmup", "found 'none'", '"auto" and integers of at least 0'),
        (
            {"warmup": 1, "schedule": "gpipe"},
            "warmup",
            "found 1 with the schedule 'gpipe'",
            "allowed is 0, or the schedules '1f1b', 'zb-h1'",
        ),
        ({"loss": "sum"}, "loss", 'found "sum"', "'per_slice' or 'whole_sequence'"),
        ({"slices": 0}, "slices", "found 0", LENGTHS),
        ({"slices": -1}, "slices", "found -1", LENGTHS),
        ({"slices": []}, "slices", "found []", LENGTHS),
        ({"slices": 2.5}, "slices", "found 2.5", LENGTHS),
        ({"slices": True}, "slices", "found True", LENGTHS),
        ({"slices": None}, "slices", "found None", LENGTHS),
        ({"slices": [0]}, "slices", "found 0", "allowed are integers of at least 1"),
        ({"slices": [4, 2.5]}, "slices", "found 2.5", "allowed are integers of at least 1"),
        ({"slices": [[1, [8]], [1, [9]]]}, "slices", "found groups whose", "allowed is one sum"),
        ({"slices": "8 slices\n"}, "slices", "found the text '8 slices\\n'", "allowed is the form"),
        ({"slices": "8"}, "slices", "found the text '8'", "allowed is the form"),
        ({"timeout_s": True}, "timeout_s", "found true", "valid number"),
        ({"timeout_s": float("inf")}, "timeout_s", "found Infinity", "finite number"),
        ({"granularity": 0}, "granularity", "found 0", "greater than or equal to 1"),
        ({"granularity": 2.5}, "granularity", "found 2.5", "integer"),
        ({"timeout_s": 0}, "timeout_s", "found 0", "greater than 0"),
        ({"timeout_s": -1.5}, "timeout_s", "found -1.5", "greater than 0"),
        ({"timeout_s": None}, "timeout_s", "found null", "number"),
        ({"replan": 1}, "replan", "found 1", "boolean"),
        ({"profile_budget_s": 0}, "profile_budget_s", "found 0", "greater than 0"),
        ({"memory_gib": -1}, "memory_gib", "found -1", "greater than 0"),
        ({"trace": ""}, "trace", 'found ""', "at least 1 character"),
        ({"trace": True}, "trace", "found true", "string"),
        ({"trace_steps": [-1]}, "trace_steps", "found [-1]", "greater than or equal to 0"),
        ({"trace_steps": 3}, "trace_steps", "found 3", "list"),
        ({"enabled": "yes"}, "enabled", 'found "yes"', "boolean"),
        ({"enabled": 1}, "enabled", "found 1", "boolean"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_refusal_is_one_line(keys: dict[str, Any], key: str, found: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        block(**keys)
    message = str(caught.value)
    assert message.startswith(f"terapipe.{key}: {found}")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, 3, "auto", [], True])
def test_block_must_be_an_object(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_block({"terapipe": value})
    assert str(caught.value) == f"terapipe: found {value!r}, allowed is a JSON object"


@pytest.mark.parametrize(
    ("slices", "described"),
    [
        ("auto", "auto"),
        (4, 4),
        ([5, 3], [5, 3]),
        (SCHEME, "[(2, [5, 3])] + [(1, [8])]"),
    ],
)
def test_describe_is_json(slices: Any, described: Any) -> None:
    config = block(slices=slices, timeout_s=30)
    # Compared as loaded and as given: JSON has lists where Python may have tuples.
    loaded = json.loads(json.dumps(config.describe()))
    assert loaded == config.describe()
    assert loaded == {
        "terapipe.enabled": True,
        "terapipe.slices": described,
        "terapipe.schedule": "1f1b",
        "terapipe.warmup": "auto",
        "terapipe.loss": "auto",
        "terapipe.granularity": 8,
        "terapipe.replan": False,
        "terapipe.profile_budget_s": 120.0,
        "terapipe.memory_gib": None,
        "terapipe.trace": None,
        "terapipe.trace_steps": [2],
        "terapipe.timeout_s": 30.0,
    }
    assert block(slices=described, timeout_s=30) == config
