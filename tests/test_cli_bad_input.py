"""Bad input to the command: exit code 2, one line that helps, and no file touched."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.planner import CostModel

from .command_files import GIB, MODEL, SHAPE, made, two_stages, write_files

ANOTHER_MODEL = {**MODEL, "hidden_size": 48, "dtype": "bfloat16"}


def changed(content: dict[str, Any], path: str, value: Any) -> str:
    """JSON with one entry set, ``path`` being its keys with dots between."""
    content = json.loads(json.dumps(content))
    place: Any = content
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(content)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of which most are bad."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    cost = two_stages().to_dict()
    found = made(two_stages(), stages=2, sequences=2).to_dict()
    texts = {
        "cut.json": '{"schema": "terapipe-cost", "vers',
        "comments.json": '{\n  // how fast\n  "train_batch_size": 8\n}\n',
        "list.json": "[1, 2]\n",
        "empty.json": "",
        "twice.json": '{"steps": 1, "steps": 2}',
        "twice_in_block.json": '{"terapipe": {"slices": 4, "slices": 8}}',
        "cost_schema.json": changed(cost, "schema", "terapipe-costs"),
        "cost_version.json": changed(cost, "version", 2),
        "cost_transfer.json": changed(cost, "transfer", {}),
        "cost_corners.json": changed(cost, "stages.0.forward.tokens", [8.0]),
        "cost_latency.json": changed(cost, "transfer.latency_ms", "fast"),
        "cost_jump.json": changed(cost, "stages.1.forward.jump", [0.0]),
        "cost_about.json": changed(cost, "about", None),
        "cost_memory.json": changed(cost, "stages.0.memory.gradients", None),
        "plan_schema.json": changed(found, "schema", "terapipe-cost"),
        "plan_version.json": changed(found, "version", 0),
        "plan_scheme.json": changed(found, "scheme", [[1, [8, -8]]]),
        "plan_key.json": changed(found, "colour", "red"),
        "plan_unsliced.json": changed(found, "unsliced", "none"),
        "plan_stages.json": changed(found, "stages", None),
        "plan_repeats.json": changed(found, "micro_batches", None),
        "plan_schedule.json": changed(found, "schedule", -1),
        "plan_long.json": changed(found, "scheme", [[2, [64, 64]]]),
        "plan_many_stages.json": changed(found, "stages", 3),
        "another_model.json": json.dumps(ANOTHER_MODEL),
        "model_key.json": json.dumps({**MODEL, "layers": 3}),
        "micro.json": '{"train_micro_batch_size_per_gpu": 3}',
        "steps.json": '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}',
        "batch.json": '{"train_batch_size": 7}',
        "batch_text.json": '{"train_batch_size": "8"}',
        "micro_object.json": '{"train_micro_batch_size_per_gpu": {}}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.json").write_bytes('{"name": "é"}'.encode("latin-1"))
    (tmp_path / "a_folder").mkdir()
    CostModel((two_stages().stages[0],), 64, about={"shape": SHAPE}).save("one_stage.json")
    return tmp_path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(capsys: pytest.CaptureFixture[str], folder: Path, line: str) -> str:
    """The one line on stderr."""
    before = snapshot(folder)
    try:
        code: Any = main(shlex.split(line))
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
    assert printed.err.startswith("terapipe")
    assert snapshot(folder) == before
    return printed.err


ONE_OF = "simulate cost.json --stages 2 --scheme"
PROFILE = "profile model.json --stages 2 --out new.json"
NOT_PLAN = "allowed is a file written by 'terapipe plan --out'"
NOT_COST = "allowed is a file written by 'terapipe profile'"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        # Arguments.
        ("", "required: command"),
        ("plans cost.json", "invalid choice: 'plans'"),
        ("plan", "required: cost, --stages"),
        ("plan cost.json", "required: --stages"),
        ("profile model.json --stages 2", "required: --out"),
        ("simulate", "required: cost"),
        ("inject plan.json", "required: config"),
        ("plan cost.json --stages 2 --fast", "unrecognized arguments: --fast"),
        ("plan cost.json --stages 2 more", "unrecognized arguments: more"),
        ("plan cost.json --stages 0", "found '0', allowed are integers of at least 1"),
        ("plan cost.json --stages -1", "found '-1', allowed are integers of at least 1"),
        ("plan cost.json --stages 1.5", "found '1.5', allowed are integers of at least 1"),
        ("plan cost.json --stages two", "found 'two', allowed are integers of at least 1"),
        ("plan cost.json --stages 2 --sequences 0", "--sequences: found '0'"),
        ("plan cost.json --stages 2 --granularity 0", "--granularity: found '0'"),
        ("plan cost.json --stages 2 --seq-length 1e3", "--seq-length: found '1e3'"),
        ("plan cost.json --stages 2 --micro-batches ''", "--micro-batches: found ''"),
        ("plan cost.json --stages 2 --epsilon -1", "found '-1', allowed is a number of at least 0"),
        ("plan cost.json --stages 2 --epsilon nan", "found 'nan', allowed is a number"),
        ("plan cost.json --stages 2 --epsilon 1e999", "found epsilon inf"),
        ("plan cost.json --stages 2 --memory 80MiB", "found '80MiB', allowed is 80GiB"),
        ("plan cost.json --stages 2 --objective best", "invalid choice: 'best'"),
        ("plan cost.json --stages 2 --schedule zigzag", "invalid choice: 'zigzag'"),
        (f"{PROFILE} --budget 1d", "found '1d', allowed is 60s or 5m"),
        (f"{PROFILE} --latency-us 1", "allowed are both or none"),
        (f"{PROFILE} --gigabytes-per-s 1", "allowed are both or none"),
        # Cost files.
        ("plan none.json --stages 2", "none.json, which cannot be read ([Errno 2] No such"),
        ("plan a_folder --stages 2", "a_folder, which cannot be read ([Errno 21]"),
        ("plan cut.json --stages 2", "which cannot be read (Unterminated string"),
        ("plan latin.json --stages 2", "which cannot be read ('utf-8' codec"),
        ("plan empty.json --stages 2", NOT_COST),
        ("plan list.json --stages 2", "found schema () in list.json"),
        ("plan ds.json --stages 2", "found schema (None, None) in ds.json"),
        ("plan plan.json --stages 2", "found schema ('terapipe-plan', 1) in plan.json"),
        ("plan cost_schema.json --stages 2", "found schema ('terapipe-costs', 1)"),
        ("plan cost_version.json --stages 2", "allowed is ('terapipe-cost', 1); write"),
        (
            "plan cost_transfer.json --stages 2",
            f"missing or wrong (KeyError('samples')), {NOT_COST}",
        ),
        ("plan cost_corners.json --stages 2", "a fit with 1 token counts and 2 times"),
        ("plan cost_jump.json --stages 2", "a jump of 1 numbers, allowed are 2"),
        ("plan cost_about.json --stages 2", NOT_COST),
        # What a cost file cannot tell.
        ("plan cost.json --stages 3", "found costs of 2 stages for a pipeline of 3"),
        ("plan cost.json --stages 2 --seq-length 65", "found measurements up to 64 tokens"),
        ("plan cost.json --stages 2 --memory 2GiB", "needs 2.14 GiB; raise --memory"),
        (
            "plan one_stage.json --stages 2 --model another_model.json",
            "hidden_size 32 instead of 48",
        ),
        (
            "plan cost.json --stages 2 --model another_model.json --out new.json",
            "cost.json of another model (hidden_size 32 instead of 48, dtype 'float32' instead of "
            "'bfloat16'), allowed are costs of this model",
        ),
        ("plan cost.json --stages 2 --model none.json", "model: found none.json, which cannot"),
        ("plan cost.json --stages 2 --model model_key.json", "found a wrong layers in model_key"),
        ("plan cost.json --stages 2 --out a_folder", "Is a directory"),
        ("plan cost.json --stages 2 --out ds.json/plan.json", "ds.json, which cannot be used"),
        # Simulate.
        ("simulate cost.json", "found neither --plan nor both --scheme and --stages"),
        ("simulate cost.json --stages 2", "found neither --plan nor both"),
        ("simulate cost.json --scheme '[(1, [64])]'", "found neither --plan nor both"),
        ("simulate cost.json --scheme '[(1, [64])]' --stages 3", "2 stages for a pipeline of 3"),
        (f"{ONE_OF} '[(1, [64, 8])]'", "found measurements up to 64 tokens for sequences of 72"),
        (f"{ONE_OF} '[(1, [64])] + [(1, [8])]'", "groups whose lengths sum to [8, 64]"),
        (f"{ONE_OF} '[1, 2]'", "found the group 1, allowed is (sequences, [lengths...])"),
        (f"{ONE_OF} 'exit(3)'", "found the text 'exit(3)', allowed is the form"),
        (f"{ONE_OF} ''", "found the text '', allowed is the form"),
        (f"{ONE_OF} '[(1, [64])] * 0'", "found an empty scheme"),
        ("simulate cost.json --plan none.json", "plan: found none.json, which cannot be read"),
        ("simulate cost.json --plan plan_long.json", "for sequences of 128"),
        ("simulate cost.json --plan plan_many_stages.json", "2 stages for a pipeline of 3"),
        ("simulate cost.json --plan plan.json --trace a_folder", "Is a directory"),
        (
            "simulate cost.json --plan plan.json --picture a_folder",
            "argument --picture: found 'a_folder', allowed are files that end in .png, .svg, .pdf",
        ),
        # Inject: plan files.
        ("inject none.json ds.json", "plan: found none.json, which cannot be read"),
        ("inject cut.json ds.json", NOT_PLAN),
        ("inject cost.json ds.json", "found schema ('terapipe-cost', 1) in cost.json"),
        ("inject plan_schema.json ds.json", "found schema ('terapipe-cost', 1) in plan_schema"),
        ("inject plan_version.json ds.json", "allowed is ('terapipe-plan', 1); write the file"),
        ("inject plan_scheme.json ds.json", "found -8 in [8, -8]"),
        ("inject plan_key.json ds.json", "unexpected keyword argument 'colour'"),
        ("inject plan_unsliced.json ds.json", NOT_PLAN),
        ("inject plan_repeats.json ds.json", "found micro_batches None"),
        ("inject plan_schedule.json ds.json", "schedule: found -1, allowed are '1f1b'"),
        ("simulate cost.json --plan plan_stages.json", "found stages None"),
        # Inject: DeepSpeed files.
        ("inject plan.json none.json", "none.json, which cannot be used (No such file"),
        ("inject plan.json a_folder", "a_folder, which cannot be used (Is a directory)"),
        ("inject plan.json comments.json", "allowed is a DeepSpeed configuration as plain JSON"),
        ("inject plan.json empty.json", "found a file that is not JSON"),
        ("inject plan.json list.json", "found list in the file, allowed is a JSON object"),
        ("inject plan.json twice.json", "found 'steps' twice in the file"),
        ("inject plan.json twice_in_block.json", "found 'slices' twice in the file"),
        ("inject plan.json micro.json", "3 sequences a step and replica, allowed are 2"),
        ("inject plan.json steps.json", "8 sequences a step and replica, allowed are 2"),
        ("inject plan.json batch.json", "found train_batch_size 7, allowed is a multiple of 2"),
        ("inject plan.json ds.json --out a_folder", "Is a directory"),
        # Profile, before anything is built.
        ("profile none.json --stages 2 --out new.json", "model: found none.json, which cannot"),
        ("profile cost.json --stages 2 --out new.json", "model: found a wrong num_layers in cost"),
        ("profile model.json --stages 2 --out plan.json", "schema ('terapipe-plan', 1) in plan"),
        (
            "profile another_model.json --stages 2 --out cost.json",
            "found cost.json of another model (hidden_size 32 instead of 48, ",
        ),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, line: str, says: str
) -> None:
    assert says in refused(capsys, folder, line)


@pytest.mark.parametrize(
    "line",
    [
        # Values of another type, or of another number.
        "plan cost_latency.json --stages 2",
        "plan cost_memory.json --stages 2 --memory 80GiB",
        "inject plan.json batch_text.json",
        "inject plan.json micro_object.json",
        # Neither UTF-8 nor JSON.
        "inject plan.json latin.json",
        # matplotlib's own error, after the time for a profile has been spent.
        "simulate cost.json --plan plan.json --picture a.xyz",
        # A division by zero, and more groups than fit in memory.
        f"{PROFILE} --latency-us 1 --gigabytes-per-s 0",
        f"{ONE_OF} '[(1, [64])] * 99999999999999999999'",
        # Two lines.
        "plan cost.json --stages 2 'a\nb'",
    ],
)
def test_input_of_a_wrong_kind(capsys: pytest.CaptureFixture[str], folder: Path, line: str) -> None:
    refused(capsys, folder, line)


def test_a_little_more_memory_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """For the plan that is refused above."""
    assert main(["plan", "cost.json", "--stages", "2", "--memory", "2.2GiB", "--json"]) == 0
    assert max(json.loads(capsys.readouterr().out)["memory"]) <= 2.2 * GIB


def test_more_stages_than_layers(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    import terapipe_ds.models.profile  # noqa: F401  libraries may print when they are imported

    capsys.readouterr()
    line = "profile model.json --stages 3 --out new.json"
    assert "found 3 stages for 2 layers" in refused(capsys, folder, line)
