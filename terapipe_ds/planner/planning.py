"""From costs to a plan: the solver's candidates, scored by formula or by simulation."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..files import write_text
from ..schedule.order import check_warmup, takes_turns
from ..scheme import SliceScheme
from .cost import CostModel
from .dp import Cost, solve
from .memory import GIB
from .prediction import knows_memory, peak_memory, predict

Objective = Literal["paper", "simulate"]
OBJECTIVES = ("paper", "simulate")

SCHEMA = "terapipe-plan"
VERSION = 1

# Even cuts that compete with the solver's schemes.
_EVEN = (1, 2, 4, 8, 16, 32, 64)
# More schemes of the solver that are scored.
_KEPT = 6

# Slack that is tried on the best schemes, in slices for each hop between stages (a hop without any
# stops all before it); and what share of the time more of it has to save, since it costs memory.
_SLACK = (1, 2, 3, 4, 6)
_TRIED = 4
_WORTH_MEMORY = 0.005


@dataclass(frozen=True)
class Candidate:
    """A scheme and what it is thought to take.

    Attributes:
        scheme: the groups of one micro-batch.
        latency_ms: of a step, by the plan's objective.
        bubble: for each stage the idle share, where it was simulated.
        memory: for each stage the most bytes at any time, where the cost model knows them.
        warmup: the schedule's slack.
    """

    scheme: SliceScheme
    latency_ms: float
    bubble: list[float] | None = None
    memory: list[float] | None = None
    warmup: int = 0


@dataclass(frozen=True)
class Plan:
    """The chosen scheme, and what it was chosen against.

    Attributes:
        scheme: the groups of one micro-batch.
        latency_ms: of a step, by the objective.
        objective: ``paper`` or ``simulate``.
        schedule: the schedule that was planned for.
        stages: the number of pipeline stages.
        micro_batches: how often the scheme is repeated in a step.
        granularity: slice lengths are multiples of this.
        unsliced: the best that whole sequences can do, of those that fit if any does.
        runner_up: the next best scheme, if there is another.
        bubble: for each stage the idle share, where it was simulated.
        memory: for each stage the most bytes at any time, where the cost model knows them.
        about: what the costs were measured on.
        warmup: the schedule's slack.
    """

    scheme: SliceScheme
    latency_ms: float
    objective: Objective
    schedule: str
    stages: int
    micro_batches: int
    granularity: int
    unsliced: Candidate
    runner_up: Candidate | None = None
    bubble: list[float] | None = None
    memory: list[float] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    warmup: int = 0

    @property
    def speedup(self) -> float:
        """Against the best without slices."""
        return self.unsliced.latency_ms / self.latency_ms if self.latency_ms else 1.0

    def for_deepspeed(self) -> tuple[int, int, SliceScheme]:
        """The micro-batch size, the accumulation steps, and each micro-batch's scheme.

        Where the plan leaves the micro-batches open (``micro_batches`` is 1), groups that repeat
        become micro-batches of their own: ``[(1, [776, 640, 632])] * 16`` is 16 of one sequence.
        """
        if self.micro_batches > 1:
            return self.scheme.sequences, self.micro_batches, self.scheme
        counts = Counter(self.scheme.groups)
        repeats = math.gcd(*counts.values())
        once = [group for group, count in counts.items() for _ in range(count // repeats)]
        scheme = SliceScheme(once)
        return scheme.sequences, repeats, scheme

    def to_dict(self) -> dict[str, Any]:
        """The content of a plan file."""
        content = {**asdict(replace(self, about={})), "about": dict(self.about)}
        content["scheme"] = _written(self.scheme)
        for name in ("unsliced", "runner_up"):
            candidate = getattr(self, name)
            if candidate is not None:
                content[name]["scheme"] = _written(candidate.scheme)
        return {"schema": SCHEMA, "version": VERSION, **content}

    def save(self, path: str | Path) -> None:
        """Writes a plan file, whole or not at all."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            ConfigError: if it cannot be read, or is no plan file of this version.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"plan: found {path}, which cannot be read ({error}), allowed is a file written by "
                "'terapipe plan --out'"
            ) from None
        return cls.from_dict(content, where=str(path))

    @classmethod
    def from_dict(cls, content: Any, *, where: str = "a plan") -> Plan:
        """Reads what :meth:`to_dict` gives; raises as :meth:`load`."""
        found = (content.get("schema"), content.get("version")) if isinstance(content, dict) else ()
        if found != (SCHEMA, VERSION):
            raise ConfigError(
                f"plan: found schema {found} in {where}, allowed is {(SCHEMA, VERSION)}; write the "
                "file again with 'terapipe plan --out'"
            )
        values = {name: value for name, value in content.items() if name not in _HEADER}
        try:
            values["scheme"] = SliceScheme(values["scheme"])
            values["unsliced"] = _candidate(values["unsliced"])
            if values["runner_up"] is not None:
                values["runner_up"] = _candidate(values["runner_up"])
            values["latency_ms"] = float(values["latency_ms"])
            read = cls(**values)
            _check(
                read.scheme.seq_length,
                read.stages,
                read.scheme.sequences,
                read.granularity,
                read.objective,
                read.micro_batches,
                0.0,
            )
            check_warmup(read.schedule, read.warmup)
            return read
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"plan: found {where} with a part that is missing or wrong ({error!r}), allowed is "
                "a file written by 'terapipe plan --out'"
            ) from None


_HEADER = ("schema", "version")


def _candidate(content: Any) -> Candidate:
    return Candidate(
        SliceScheme(content["scheme"]),
        float(content["latency_ms"]),
        content["bubble"],
        content["memory"],
        # Plans of before there was any have none.
        content.get("warmup", 0),
    )


def paper_latency(cost: Cost, scheme: SliceScheme, stages: int, *, micro_batches: int = 1) -> float:
    """ms of a step by the paper's formula: the sum of all t, plus (K - 1) times the largest t.

    Args:
        cost: times of slices, forward and backward together.
        scheme: the groups of a micro-batch.
        stages: K.
        micro_batches: how often the scheme is repeated.
    """
    times = [
        float(cost.time(tokens.length, tokens.start, group.sequences))
        for group in scheme.groups
        for tokens in group.ranges()
    ]
    return micro_batches * math.fsum(times) + (stages - 1) * max(times)


def plan(
    cost: Cost,
    *,
    seq_length: int,
    stages: int,
    sequences: int,
    granularity: int = 8,
    objective: Objective = "paper",
    schedule: str = "1f1b",
    micro_batches: int = 1,
    epsilon: float = 0.0,
    memory_bytes: float | None = None,
    group_sizes: Sequence[int] | None = None,
    least_gain: float = 0.0,
    warmup: int | Literal["auto"] = 0,
) -> Plan:
    """The best scheme for a micro-batch of ``sequences`` sequences.

    Args:
        cost: anything with the ``time`` of a :class:`~terapipe_ds.planner.CostModel`. A
            ``CostModel`` also knows stages apart, forward and backward apart, transfers and memory;
            for others all stages are alike, a forward is a third (and the weight gradients are, for
            schedules that put them off), and transfers take no time.
        seq_length: tokens of a sequence.
        stages: the number of pipeline stages.
        sequences: sequences of a micro-batch; with ``micro_batches=1``, all those of a step.
        granularity: slice lengths are multiples of this many tokens (the last one of a sequence
            takes what is left).
        objective: ``paper`` minimises the sum of all t plus (K - 1) times the largest t, to the
            exact optimum. ``simulate`` scores the solver's best schemes, and even ones, by the
            simulated makespan of the schedule with each stage's own costs.
        schedule: the schedule to simulate, and whose memory is counted.
        micro_batches: how often the scheme is repeated in a step.
        epsilon: in ms, see :func:`~terapipe_ds.planner.dp.solve`.
        memory_bytes: plans that need more on any stage are dropped.
        group_sizes: how many sequences may go together; any number if None.
        least_gain: the share of the time without slices that a plan must save to be preferred.
        warmup: the schedule's slack, see :func:`~terapipe_ds.schedule.actions`; with ``"auto"`` as
            much as saves half a percent at each step up, by simulation.

    Raises:
        ConfigError: if an argument is impossible, or no plan fits in memory.
    """
    _check(seq_length, stages, sequences, granularity, objective, micro_batches, epsilon)
    fixed = 0 if warmup == "auto" else warmup
    check_warmup(schedule, fixed)
    if isinstance(cost, CostModel):
        cost.check_covers(seq_length)
    if memory_bytes is not None and not knows_memory(cost, stages):
        raise ConfigError(
            "plan: found a memory limit for costs that do not say what a stage holds, allowed is a "
            "cost file with memory; drop --memory, or profile with 'terapipe profile'"
        )
    sizes = _sizes(group_sizes, sequences)
    problem: dict[str, Any] = {
        "seq_length": seq_length,
        "stages": stages,
        "sequences": sequences,
        "micro_batches": micro_batches,
        "group_sizes": sizes,
    }
    optimum = solve(cost, granularity=granularity, epsilon=epsilon, keep=_KEPT, **problem)
    whole = solve(cost, granularity=seq_length, keep=_KEPT, **problem)
    schemes = [optimum.scheme, *optimum.others, whole.scheme, *whole.others]
    schemes += _even_schemes(seq_length, sequences, granularity, sizes)
    scorer = _Scorer(cost, stages, schedule, micro_batches, objective)
    # Where two take the same time, the one with fewer slices comes first.
    candidates = sorted((scorer.score(each, fixed) for each in dict.fromkeys(schemes)), key=_rank)
    if warmup == "auto" and objective == "simulate" and takes_turns(schedule) and stages > 1:
        candidates = sorted(_with_slack(candidates, scorer, memory_bytes), key=_rank)
    fitting = candidates if memory_bytes is None else _fitting(candidates, memory_bytes)
    best = fitting[0]
    unsliced = next((c for c in fitting if _is_unsliced(c.scheme)), None)
    if unsliced is not None and best.latency_ms >= (1 - least_gain) * unsliced.latency_ms:
        best = unsliced
    unsliced = unsliced or next(c for c in candidates if _is_unsliced(c.scheme))
    return Plan(
        scheme=best.scheme,
        latency_ms=best.latency_ms,
        objective=objective,
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        granularity=granularity,
        unsliced=unsliced,
        runner_up=next((c for c in fitting if c.scheme != best.scheme), None),
        bubble=best.bubble,
        memory=best.memory,
        about=dict(cost.about) if isinstance(cost, CostModel) else {},
        warmup=best.warmup,
    )


def _with_slack(
    candidates: Sequence[Candidate], scorer: _Scorer, memory_bytes: float | None
) -> Iterator[Candidate]:
    """The candidates, the best of them (sliced and not) with as much slack as is worth its memory.

    Args:
        candidates: without slack, the fastest first.
        scorer: times them.
        memory_bytes: slack that needs more on any stage is not tried.
    """
    unsliced = next(each for each in candidates if _is_unsliced(each.scheme))
    for place, candidate in enumerate(candidates):
        if place >= _TRIED and candidate is not unsliced:
            yield candidate
            continue
        best = candidate
        for each_hop in _SLACK:
            more = scorer.score(candidate.scheme, each_hop * (scorer.stages - 1))
            if memory_bytes is not None and max(more.memory or [math.inf]) > memory_bytes:
                break
            if more.latency_ms > (1 - _WORTH_MEMORY) * best.latency_ms:
                break
            best = more
        yield best


class _Scorer:
    def __init__(
        self, cost: Cost, stages: int, schedule: str, micro_batches: int, objective: Objective
    ) -> None:
        self.cost, self.stages, self.objective = cost, stages, objective
        self.step: dict[str, Any] = {
            "stages": stages,
            "schedule": schedule,
            "micro_batches": micro_batches,
        }

    def score(self, scheme: SliceScheme, warmup: int) -> Candidate:
        memory = None
        if isinstance(self.cost, CostModel):
            memory = peak_memory(self.cost, scheme, **self.step, warmup=warmup)
        if self.objective == "simulate":
            timeline = predict(self.cost, scheme, **self.step, warmup=warmup)
            return Candidate(scheme, timeline.makespan_ms, timeline.bubble, memory, warmup)
        latency = paper_latency(
            self.cost, scheme, self.stages, micro_batches=self.step["micro_batches"]
        )
        return Candidate(scheme, latency, None, memory, warmup)


def _even_schemes(
    seq_length: int, sequences: int, granularity: int, group_sizes: Sequence[int]
) -> Iterator[SliceScheme]:
    """Even cuts on the grid, for every way to group the sequences evenly."""
    sizes = [size for size in group_sizes if sequences % size == 0]
    for count in _EVEN:
        if count > max(1, seq_length // granularity):
            return
        for size in sizes:
            cut = SliceScheme.even(
                sequences=size, seq_length=seq_length, count=count, unit=granularity
            )
            yield SliceScheme([*cut.groups] * (sequences // size))


def _fitting(candidates: Iterable[Candidate], memory_bytes: float) -> list[Candidate]:
    needs = [(max(c.memory or [math.inf]), c) for c in candidates]
    fitting = [candidate for need, candidate in needs if need <= memory_bytes]
    if not fitting:
        least, candidate = min(needs, key=lambda entry: entry[0])
        raise ConfigError(
            f"plan: found no plan that fits in {memory_bytes / GIB:.2f} GiB, the leanest "
            f"({candidate.scheme}) needs {least / GIB:.2f} GiB; raise --memory "
            "(terapipe.memory_gib), use more stages, ZeRO-1 or activation checkpointing"
        )
    return fitting


def _is_unsliced(scheme: SliceScheme) -> bool:
    return max(scheme.slices) == 1


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.latency_ms, sum(candidate.scheme.slices)


def _sizes(group_sizes: Sequence[int] | None, sequences: int) -> list[int]:
    """The numbers of sequences that may go together."""
    sizes = list(range(1, sequences + 1) if group_sizes is None else group_sizes)
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ConfigError(
            f"plan: found group_sizes {sizes}, allowed are integers of at least 1; change "
            "group_sizes"
        )
    return [size for size in sizes if size <= sequences]


def _written(scheme: SliceScheme) -> list[Any]:
    return [[sequences, lengths] for sequences, lengths in scheme]


def _check(
    seq_length: int,
    stages: int,
    sequences: int,
    granularity: int,
    objective: str,
    micro_batches: int,
    epsilon: float,
) -> None:
    numbers = {
        "seq_length": seq_length,
        "stages": stages,
        "sequences": sequences,
        "granularity": granularity,
        "micro_batches": micro_batches,
    }
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"plan: found {name} {number!r}, allowed are integers of at least 1; change {name}"
            )
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"plan: found objective {objective!r}, allowed are {', '.join(map(repr, OBJECTIVES))}"
        )
    if not 0.0 <= epsilon < math.inf:
        raise ConfigError(f"plan: found epsilon {epsilon!r}, allowed is a time of at least 0 ms")


__all__ = [
    "Candidate",
    "Plan",
    "paper_latency",
    "plan",
]
