"""Sliced training equals the unsliced single-process run: loss, gradients, parameters."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from . import cases, workers
from .ranks import run_ranks

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 4)
_ALL = {stages: cases.covering_cases(stages) for stages in STAGES}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, extensions_built: None) -> Path:
    """The file with what the unsliced single-process run gives in all cases."""
    listed = [case for group in _ALL.values() for case in group]
    folder = tmp_path_factory.mktemp("reference")
    run_ranks(workers.reference_runs, 1, folder, listed, timeout=200)
    return folder / "rank0.pickle"


@pytest.fixture(scope="module")
def comparisons(
    tmp_path_factory: pytest.TempPathFactory, references: Path
) -> dict[str, list[workers.Comparison]]:
    """For each case, the differences on each of its ranks."""
    found: dict[str, list[workers.Comparison]] = {}
    for stages, listed in _ALL.items():
        folder = tmp_path_factory.mktemp(f"stages{stages}")
        results = run_ranks(workers.sliced_runs, stages, folder, listed, references, timeout=200)
        for case in listed:
            found[case.name] = [result.value[case.name] for result in results]
    return found


@pytest.fixture(scope="module")
def parameter_names(references: Path) -> dict[str, set[str]]:
    """For each case, all parameters of the unsliced model."""
    loaded = pickle.loads(references.read_bytes())
    return {name: set(reference.gradients) for name, reference in loaded.items()}


@pytest.mark.parametrize("stages", STAGES)
def test_every_pair_of_settings_is_covered(stages: int) -> None:
    covered = set().union(*(cases.pairs(cases.settings_of(case)) for case in _ALL[stages]))
    assert covered >= cases.all_pairs()


@pytest.mark.parametrize(
    "case", [case for group in _ALL.values() for case in group], ids=lambda case: case.name
)
def test_equals_the_unsliced_run(
    case: cases.Case,
    comparisons: dict[str, list[workers.Comparison]],
    parameter_names: dict[str, set[str]],
) -> None:
    compared = set().union(*(found.names for found in comparisons[case.name]))
    assert compared == parameter_names[case.name]
    for stage, found in enumerate(comparisons[case.name]):
        assert found.loss <= case.tolerance, f"loss differs by {found.loss:.2e} on stage {stage}"
        for what, (gap, name) in (("gradient", found.gradient), ("parameter", found.parameter)):
            assert gap <= case.tolerance, f"{what} of {name} differs by {gap:.2e} on stage {stage}"


def test_a_dropped_context_gradient_is_seen(folder: Path, references: Path) -> None:
    case = next(case for case in _ALL[2] if case.dtype == "float64")
    results = run_ranks(workers.sliced_runs, 2, folder, [case], references, broken="dkv")
    gaps = [result.value[case.name].gradient for result in results]
    assert max(gaps)[0] > 1e-3, f"dK and dV were dropped, but gradients differ by {gaps} only"
