"""The ``terapipe`` command: measures, plans, simulates, writes plans into a JSON, checks a setup.

Exit code 0 is success; 2 is bad input, with one line on stderr that says what was found, what is
allowed and what to change; 1 is for what ``terapipe doctor`` finds. No file is half-written.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from .errors import ConfigError, TeraPipeError
from .files import write_text
from .planner.cost import CostModel, Transfer
from .planner.inject import inject
from .planner.memory import GIB
from .planner.planning import OBJECTIVES, Candidate, Plan, paper_latency, plan
from .planner.prediction import predict
from .schedule.simulator import Timeline
from .schedule.trace import MeasuredTimeline, write_chrome_trace, write_picture
from .scheme import SliceScheme

_PICTURES = (".png", ".svg", ".pdf")
_SCHEDULES = ("1f1b", "gpipe", "zb-h1")


class _Parser(argparse.ArgumentParser):
    """Errors on one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        print(f"{self.prog}: {line}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except TeraPipeError as error:
        print(f"terapipe: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads has enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(
            f"terapipe: found {error.filename2 or error.filename}, which cannot be used "
            f"({error.strerror}); change the path",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("terapipe: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="terapipe", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    _add_profile(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_inject(commands)
    _add_doctor(commands)
    return parser


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="time the stages of a model on this machine",
        description="Times the stages of a model on this machine and writes a cost file.",
    )
    parser.add_argument("model", type=Path, help="a JSON file as in configs/models")
    parser.add_argument("--out", type=Path, required=True, help="the cost file to write")
    parser.add_argument("--stages", type=_positive, required=True, help="pipeline stages")
    parser.add_argument(
        "--sequences", type=_positive, default=1, help="sequences of a micro-batch (1)"
    )
    parser.add_argument(
        "--granularity",
        type=_positive,
        default=8,
        help="slices are multiples of so many tokens (8)",
    )
    parser.add_argument(
        "--budget", type=_seconds, default=120.0, help="time to spend, as 60s or 5m (2m)"
    )
    parser.add_argument("--latency-us", type=_number, help="of a message between two stages")
    parser.add_argument("--gigabytes-per-s", type=_rate, help="between two stages")
    parser.add_argument("--plot", type=_picture, help="a picture of the measurements and the fit")
    parser.add_argument("--json", action="store_true", help="print the cost file")
    parser.set_defaults(run=_profile)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="find the best slice lengths",
        description="Finds the best slice lengths for measured costs.",
    )
    parser.add_argument("cost", type=Path, help="a cost file of 'terapipe profile'")
    parser.add_argument("--stages", type=_positive, required=True, help="pipeline stages")
    parser.add_argument("--seq-length", type=_positive, help="tokens (as measured)")
    parser.add_argument(
        "--sequences",
        type=_positive,
        default=1,
        help="sequences of a step and replica, or of a micro-batch with --micro-batches (1)",
    )
    parser.add_argument(
        "--micro-batches", type=_positive, default=1, help="gradient accumulation steps (1)"
    )
    parser.add_argument("--granularity", type=_positive, default=8, help="tokens (8)")
    parser.add_argument("--objective", choices=OBJECTIVES, default="simulate")
    parser.add_argument("--schedule", choices=_SCHEDULES, default="1f1b")
    parser.add_argument(
        "--warmup", type=_slack, default="auto", help="more slices that a stage may hold (auto)"
    )
    parser.add_argument("--memory", type=_gibibytes, help="a rank's memory, as 80GiB")
    parser.add_argument("--epsilon", type=_number, default=0.0, help="ms; 0 is the optimum (0)")
    parser.add_argument("--model", type=Path, help="refuse costs of another model than this one")
    parser.add_argument("--out", type=Path, help="the plan file to write")
    parser.add_argument("--json", action="store_true", help="print the plan file")
    parser.set_defaults(run=_plan)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="simulate a step",
        description="Simulates a step of a scheme with measured costs.",
    )
    parser.add_argument("cost", type=Path, help="a cost file of 'terapipe profile'")
    parser.add_argument("--plan", type=Path, help="a plan file, instead of the next five")
    parser.add_argument("--scheme", help="as text: '[(1, [776, 640, 632])] * 16'")
    parser.add_argument("--stages", type=_positive, help="pipeline stages")
    parser.add_argument("--micro-batches", type=_positive, default=1, help="(1)")
    parser.add_argument("--schedule", choices=_SCHEDULES, default="1f1b")
    parser.add_argument(
        "--warmup", type=_count, default=0, help="more slices that a stage may hold (0)"
    )
    parser.add_argument("--trace", type=Path, help="a Perfetto trace to write")
    parser.add_argument("--picture", type=_picture, help="a picture to write, .png or .svg")
    parser.add_argument("--json", action="store_true", help="print numbers for programs")
    parser.set_defaults(run=_simulate)


def _add_inject(commands: Any) -> None:
    parser = commands.add_parser(
        "inject",
        help="write a plan into a DeepSpeed JSON",
        description="Writes a plan into a DeepSpeed JSON and says what changed.",
    )
    parser.add_argument("plan", type=Path, help="a plan file of 'terapipe plan --out'")
    parser.add_argument("config", type=Path, help="the DeepSpeed JSON")
    parser.add_argument("--out", type=Path, help="where to write it (in place)")
    parser.add_argument("--json", action="store_true", help="print the changes for programs")
    parser.set_defaults(run=_inject)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say whether this environment, script and DeepSpeed JSON will slice",
        description="Says whether this environment, script and DeepSpeed JSON will slice. Exit "
        "code 1 if anything would be refused.",
    )
    parser.add_argument(
        "--deepspeed-config", type=Path, help="the JSON, if the script's arguments do not name it"
    )
    parser.add_argument("--model", type=Path, help="the model's shape, as in configs/models")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ARGUMENTS",
        help="as after terapipe_ds.run",
    )
    parser.set_defaults(run=_doctor)


def _profile(args: argparse.Namespace) -> None:
    from .models.preset import load_preset

    preset = load_preset(args.model)
    preset.check_profile(stages=args.stages, granularity=args.granularity)
    if args.out.exists():
        _check_shape(CostModel.load(args.out), preset.shape(), args.out)
    given = (args.latency_us, args.gigabytes_per_s)
    if (given[0] is None) != (given[1] is None):
        raise ConfigError(
            "profile: found one of --latency-us and --gigabytes-per-s, allowed are both or none"
        )
    transfer = None
    if args.latency_us is not None:
        element = {"float64": 8, "float32": 4, "bfloat16": 2}[preset.dtype]
        transfer = Transfer(
            latency_ms=args.latency_us / 1e3,
            ms_per_byte=1e3 / (args.gigabytes_per_s * 1e9),
            bytes_per_token=preset.hidden_size * element,
        )
    partial_path = args.out.with_name(f"{args.out.name}.partial")
    # Libraries print to stdout when they are imported and used, which belongs to the result.
    with contextlib.redirect_stdout(sys.stderr):
        from .models.profile import is_first_rank, profile_model

        cost = profile_model(
            preset,
            stages=args.stages,
            sequences=args.sequences,
            granularity=args.granularity,
            budget_s=args.budget,
            partial_path=partial_path,
            transfer=transfer,
        )
    if not is_first_rank():
        return
    cost.save(args.out)
    partial_path.unlink(missing_ok=True)
    if args.plot is not None:
        from .planner.plot import plot_costs

        plot_costs(cost, args.plot)
    if args.json:
        print(json.dumps(cost.to_dict()))
        return
    _print_costs(cost)
    print(f"\ncost file: {args.out}")


def _plan(args: argparse.Namespace) -> None:
    cost = CostModel.load(args.cost)
    if args.model is not None:
        from .models.preset import load_preset

        _check_shape(cost, load_preset(args.model).shape(), args.cost)
    measured = cost.about.get("stages")
    if measured not in (None, args.stages):
        raise ConfigError(
            f"cost: found {args.cost}, measured for {measured} stages, allowed are its own "
            f"--stages, since each of {args.stages} stages has other layers; change --stages, or "
            "profile again"
        )
    found = plan(
        cost,
        seq_length=args.seq_length or cost.seq_length,
        stages=args.stages,
        sequences=args.sequences,
        granularity=args.granularity,
        objective=args.objective,
        schedule=args.schedule,
        micro_batches=args.micro_batches,
        epsilon=args.epsilon,
        memory_bytes=args.memory,
        warmup=args.warmup,
    )
    if args.out is not None:
        found.save(args.out)
    if args.json:
        print(json.dumps(found.to_dict()))
        return
    _print_plan(found)
    if args.out is not None:
        print(f"\nplan file: {args.out} (terapipe inject {args.out} ds_config.json)")


def _simulate(args: argparse.Namespace) -> None:
    cost = CostModel.load(args.cost)
    if args.plan is not None and (args.scheme is not None or args.stages is not None):
        raise ConfigError(
            "simulate: found --plan with --scheme or --stages, allowed is one of these; the plan "
            "has its own"
        )
    if args.plan is not None:
        found = Plan.load(args.plan)
        scheme, stages, schedule = found.scheme, found.stages, found.schedule
        micro_batches, warmup = found.micro_batches, found.warmup
    elif args.scheme is None or args.stages is None:
        raise ConfigError(
            "simulate: found neither --plan nor both --scheme and --stages, allowed is one of these"
        )
    else:
        scheme = SliceScheme.from_text(args.scheme)
        stages, schedule, micro_batches = args.stages, args.schedule, args.micro_batches
        warmup = args.warmup
    cost.check_covers(scheme.seq_length)
    timeline = predict(
        cost,
        scheme,
        stages=stages,
        schedule=schedule,
        micro_batches=micro_batches,
        warmup=warmup,
    )
    spans = {str(scheme): MeasuredTimeline.simulated(timeline)}
    if args.trace is not None:
        write_chrome_trace(args.trace, spans)
    if args.picture is not None:
        title = f"{schedule}, {timeline.makespan_ms:.1f} ms: {scheme}"
        write_picture(args.picture, {title[:120]: next(iter(spans.values()))})
    formula = paper_latency(cost, scheme, stages, micro_batches=micro_batches)
    if args.json:
        print(json.dumps(_numbers(timeline, formula)))
        return
    _print_timeline(timeline, formula)


def _inject(args: argparse.Namespace) -> None:
    found = Plan.load(args.plan)
    try:
        before = args.config.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"inject: found {args.config}, which is not UTF-8 ({error.reason}), allowed is a "
            "DeepSpeed configuration as plain JSON"
        ) from None
    text, changes = inject(found, before)
    out = args.out or args.config
    write_text(out, text)
    if args.json:
        print(json.dumps({"file": str(out), "changes": changes}))
        return
    print("\n".join(changes) or "nothing to change")
    print(f"written: {out}")


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import as_data, as_text, counts, examine, read_case

    case = read_case(ds_config=args.deepspeed_config, command=args.script, model=args.model)
    findings = examine(case)
    print(json.dumps(as_data(findings)) if args.json else as_text(findings))
    return 1 if counts(findings)[0] else 0


def _check_shape(cost: CostModel, shape: dict[str, Any], path: Path) -> None:
    found = cost.about.get("shape")
    if found == shape:
        return
    differs = [key for key in shape if not found or found.get(key) != shape[key]]
    raise ConfigError(
        f"cost: found {path} of another model ("
        + ", ".join(
            f"{key} {(found or {}).get(key)!r} instead of {shape[key]!r}" for key in differs
        )
        + "), allowed are costs of this model; change the path, or profile again"
    )


def _numbers(timeline: Timeline, formula: float) -> dict[str, Any]:
    return {
        "makespan_ms": timeline.makespan_ms,
        "paper_ms": formula,
        "busy_ms": timeline.busy_ms,
        "idle_ms": timeline.idle_ms,
        "bubble": timeline.bubble,
        "peak_in_flight": timeline.peak_in_flight,
        "critical_path": [
            [event.stage, str(event.action), event.start_ms, event.stop_ms]
            for event in timeline.critical_path
        ],
    }


def _print_costs(cost: CostModel) -> None:
    for stage in cost.stages:
        forms = ", ".join(f"{form} {error:.1%}" for form, error in stage.errors.items())
        print(
            f"{stage.name}: held-out error {stage.error:.1%} (median) with the form "
            f"{stage.forward.form}; all forms: {forms}"
        )
        whole = stage.time(cost.seq_length, 0)
        print(f"  a sequence of {cost.seq_length} tokens takes {whole:.1f} ms")
    transfer = cost.transfer
    rate = 1 / (transfer.ms_per_byte * 1e6) if transfer.ms_per_byte else float("inf")
    print(f"message: {transfer.latency_ms * 1e3:.0f} us and {rate:.2f} GB/s")


def _print_plan(found: Plan) -> None:
    print(
        f"{found.stages} stages, {found.schedule}, {found.micro_batches} micro-batches, "
        f"objective {found.objective}{f', warmup {found.warmup}' if found.warmup else ''}\n"
    )
    print(f"{'':14}{'ms':>10}{'speedup':>9}{'bubble':>8}{'GiB':>8}  scheme")
    best = Candidate(found.scheme, found.latency_ms, found.bubble, found.memory)
    for name, row in (
        ("plan", best),
        ("runner-up", found.runner_up),
        ("no slicing", found.unsliced),
    ):
        if row is None:
            continue
        speedup = found.unsliced.latency_ms / row.latency_ms
        bubble = f"{max(row.bubble):.0%}" if row.bubble else ""
        memory = f"{max(row.memory) / GIB:.2f}" if row.memory else ""
        print(
            f"{name:14}{row.latency_ms:>10.1f}{speedup:>8.2f}x{bubble:>8}{memory:>8}  {row.scheme}"
        )
    size, steps, scheme = found.for_deepspeed()
    print(
        f"\nfor DeepSpeed: train_micro_batch_size_per_gpu {size}, gradient_accumulation_steps "
        f"{steps}, slices {scheme}"
    )


def _print_timeline(timeline: Timeline, formula: float) -> None:
    print(f"makespan {timeline.makespan_ms:.1f} ms (the paper's formula: {formula:.1f} ms)\n")
    print(f"{'stage':>5}{'busy ms':>10}{'idle ms':>10}{'bubble':>8}{'in flight':>11}")
    for stage, (busy, idle, bubble, peak) in enumerate(
        zip(
            timeline.busy_ms,
            timeline.idle_ms,
            timeline.bubble,
            timeline.peak_in_flight,
            strict=True,
        )
    ):
        print(f"{stage:>5}{busy:>10.1f}{idle:>10.1f}{bubble:>8.0%}{peak:>11}")
    path = timeline.critical_path
    hops = sum(a.stage != b.stage for a, b in pairwise(path))
    print(f"\ncritical path: {len(path)} actions, {hops} changes of stage")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed are integers of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed are integers of at least 0")
    return int(text)


def _slack(text: str) -> Any:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f'found {text!r}, allowed are "auto" and integers of at least 0'
        )
    return text if text == "auto" else int(text)


def _number(text: str) -> float:
    return _scaled(text, r"()", {"": 1.0}, "a number of at least 0")


def _rate(text: str) -> float:
    rate = _number(text)
    if not rate:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is a number above 0")
    return rate


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, allowed are files that end in {', '.join(_PICTURES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "found no matplotlib, which pictures need; install terapipe-ds[plot]"
        )
    return path


def _seconds(text: str) -> float:
    return _scaled(text, r"(s|m|h)?", {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}, "60s or 5m")


def _gibibytes(text: str) -> float:
    return _scaled(text, r"(GiB|GB)?", {"": GIB, "GiB": GIB, "GB": 1e9}, "80GiB")


def _scaled(text: str, units: str, factors: dict[str, float], allowed: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*" + units, text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is {allowed}")
    return float(found.group(1)) * factors[found.group(2) or ""]


if __name__ == "__main__":
    sys.exit(main())
