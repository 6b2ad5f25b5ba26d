"""The command: plan, simulate and inject print and write what the package's functions give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.planner import Plan, paper_latency, predict
from terapipe_ds.planner.inject import inject
from terapipe_ds.scheme import SliceScheme

from .command_files import DS_CONFIG, GIB, made, two_stages, write_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that succeeds prints."""
    assert main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def as_json(content: Any) -> Any:
    return json.loads(json.dumps(content))


# So rough that another plan is taken than the best.
ROUGH = {"epsilon": 20.0, "objective": "paper", "sequences": 8, "granularity": 1}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--sequences 3", {"sequences": 3}),
    ("--sequences 2 --micro-batches 4", {"sequences": 2, "micro_batches": 4}),
    ("--seq-length 40", {"seq_length": 40}),
    ("--granularity 16 --sequences 3", {"granularity": 16, "sequences": 3}),
    ("--objective paper", {"objective": "paper"}),
    ("--objective simulate --schedule gpipe", {"schedule": "gpipe"}),
    ("--schedule zb-h1", {"schedule": "zb-h1"}),
    ("--epsilon 20 --objective paper --sequences 8 --granularity 1", ROUGH),
    ("--memory 2.5GiB --sequences 4", {"memory_bytes": 2.5 * GIB, "sequences": 4}),
    ("--memory 2.5 --sequences 4", {"memory_bytes": 2.5 * GIB, "sequences": 4}),
    ("--memory 2.7e0GB --sequences 4", {"memory_bytes": 2.7e9, "sequences": 4}),
    ("--model model.json", {}),
]


@pytest.mark.parametrize(("options", "meant"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_plan_as_json(
    capsys: pytest.CaptureFixture[str], options: str, meant: dict[str, Any]
) -> None:
    out = run(capsys, "plan", "cost.json", "--stages", 2, "--json", *options.split())
    assert json.loads(out) == as_json(made(two_stages(), stages=2, **meant).to_dict())


def test_memory_and_epsilon_change_the_plan() -> None:
    """The cases above would notice if they were not heeded."""
    free = made(two_stages(), stages=2, sequences=4)
    fitting = made(two_stages(), stages=2, sequences=4, memory_bytes=2.5 * GIB)
    assert free.memory is not None and fitting.memory is not None
    assert max(fitting.memory) <= 2.5 * GIB < 2.7e9 < max(free.memory)
    rough = made(two_stages(), stages=2, **ROUGH)
    assert rough.latency_ms > made(two_stages(), stages=2, **{**ROUGH, "epsilon": 0}).latency_ms


def test_plan_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    out = run(capsys, "plan", "cost.json", "--stages", 2, "--out", "new/my plan.json")
    assert Plan.load("new/my plan.json") == made(two_stages(), stages=2)
    assert out.splitlines()[-1].startswith("plan file: new/my plan.json")
    assert [path.name for path in (folder / "new").iterdir()] == ["my plan.json"]


def test_plan_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--sequences", 2, "--micro-batches", 2)
    out = run(capsys, "plan", "cost.json", "--stages", 2, *sizes)
    found = made(two_stages(), stages=2, sequences=2, micro_batches=2)
    assert out.startswith("2 stages, 1f1b, 2 micro-batches, objective simulate\n")
    rows = {line[:14].strip(): line[14:] for line in out.splitlines() if "x " in line[14:]}
    assert list(rows) == ["plan", "runner-up", "no slicing"]
    for name, best in (("plan", found), ("runner-up", found.runner_up)):
        assert best is not None and best.bubble is not None and best.memory is not None
        ms, speedup, bubble, gib, scheme = rows[name].split(maxsplit=4)
        assert (ms, scheme) == (f"{best.latency_ms:.1f}", str(best.scheme))
        assert speedup == f"{found.unsliced.latency_ms / best.latency_ms:.2f}x"
        assert (bubble, gib) == (f"{max(best.bubble):.0%}", f"{max(best.memory) / GIB:.2f}")
    assert rows["no slicing"].split()[1] == "1.00x"
    size, steps, scheme = found.for_deepspeed()
    assert out.splitlines()[-1] == (
        f"for DeepSpeed: train_micro_batch_size_per_gpu {size}, "
        f"gradient_accumulation_steps {steps}, slices {scheme}"
    )


def test_plan_as_a_table_by_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """No bubble is known; the column is there, and empty."""
    out = run(capsys, "plan", "cost.json", "--stages", 2, "--objective", "paper")
    row = next(line for line in out.splitlines() if line.startswith("plan "))
    assert "%" not in row
    assert row.endswith(str(made(two_stages(), stages=2, objective="paper").scheme))


@pytest.mark.parametrize("options", ["", "--micro-batches 3", "--schedule gpipe"])
def test_simulate_a_scheme_as_json(capsys: pytest.CaptureFixture[str], options: str) -> None:
    text = "[(1, [24, 40])] * 2 + [(2, [64])]"
    words = options.split()
    out = run(
        capsys, "simulate", "cost.json", "--scheme", text, "--stages", 2, "--json", *options.split()
    )
    scheme, cost = SliceScheme.from_text(text), two_stages()
    repeats = 3 if "--micro-batches" in words else 1
    schedule = "gpipe" if "gpipe" in words else "1f1b"
    timeline = predict(cost, scheme, stages=2, schedule=schedule, micro_batches=repeats)
    assert json.loads(out) == as_json(
        {
            "makespan_ms": timeline.makespan_ms,
            "paper_ms": paper_latency(cost, scheme, 2, micro_batches=repeats),
            "busy_ms": timeline.busy_ms,
            "idle_ms": timeline.idle_ms,
            "bubble": timeline.bubble,
            "peak_in_flight": timeline.peak_in_flight,
            "critical_path": [
                [event.stage, str(event.action), event.start_ms, event.stop_ms]
                for event in timeline.critical_path
            ],
        }
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_simulating_a_plan_gives_its_time(
    capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    options = ("--schedule", schedule, "--sequences", 2, "--micro-batches", 3)
    run(capsys, "plan", "cost.json", "--stages", 2, *options, "--out", "other.json")
    out = run(capsys, "simulate", "cost.json", "--plan", "other.json", "--json")
    found = Plan.load("other.json")
    assert found.schedule == schedule
    assert json.loads(out)["makespan_ms"] == found.latency_ms
    assert json.loads(out)["bubble"] == found.bubble


def test_simulate_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "simulate", "cost.json", "--plan", "plan.json")
    found = Plan.load("plan.json")
    timeline = predict(two_stages(), found.scheme, stages=2, schedule="1f1b")
    lines = out.splitlines()
    assert lines[0].startswith(f"makespan {timeline.makespan_ms:.1f} ms (the paper's formula: ")
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
    for number, line in enumerate(lines[3:5]):
        assert line.split()[1] == f"{timeline.busy_ms[number]:.1f}"
        assert line.split()[-1] == str(timeline.peak_in_flight[number])
    assert lines[-1].startswith(f"critical path: {len(timeline.critical_path)} actions, ")


def test_simulate_writes_a_trace_and_pictures(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    pytest.importorskip("matplotlib")
    before = set(folder.iterdir())
    for picture in ("a.png", "a.svg"):
        files = ("--trace", "a.json", "--picture", picture)
        run(capsys, "simulate", "cost.json", "--plan", "plan.json", *files)
    assert {path.name for path in set(folder.iterdir()) - before} == {"a.json", "a.png", "a.svg"}
    spans = [e for e in json.loads(Path("a.json").read_text())["traceEvents"] if e["ph"] == "X"]
    slices = sum(Plan.load("plan.json").scheme.slices)
    assert len(spans) == 2 * 2 * slices
    assert {span["cat"] for span in spans} == {"F", "B"}
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("a.svg").read_text()


def test_inject_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    text, changes = inject(Plan.load("plan.json"), DS_CONFIG)
    out = run(capsys, "inject", "plan.json", "ds.json")
    assert Path("ds.json").read_text() == text != DS_CONFIG
    assert out.splitlines() == [*changes, "written: ds.json"]
    assert run(capsys, "inject", "plan.json", "ds.json").startswith("nothing to change\n")
    assert Path("ds.json").read_text() == text


def test_inject_into_another_file(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "inject", "plan.json", "ds.json", "--out", "new/ds.json", "--json")
    text, changes = inject(Plan.load("plan.json"), DS_CONFIG)
    assert json.loads(out) == {"file": "new/ds.json", "changes": changes}
    assert Path("new/ds.json").read_text() == text
    assert Path("ds.json").read_text() == DS_CONFIG


def test_inject_keeps_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_bytes(DS_CONFIG.replace("\n", "\r\n").encode())
    run(capsys, "inject", "plan.json", "ds.json")
    kept = Path("ds.json").read_bytes()
    assert kept.startswith(b'{\r\n  "train_batch_size": 8,\r\n  "optimizer"')
    assert kept.count(b"\n") == kept.count(b"\r\n")


@pytest.mark.parametrize("command", ["", "profile", "plan", "simulate", "inject"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: terapipe {command}".rstrip())
    assert printed.err == ""
