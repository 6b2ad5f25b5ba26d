"""Megatron-DeepSpeed's own pretrain_gpt.py, stock and sliced, where a checkout of it is there.

    MEGATRON_DEEPSPEED=~/Megatron-DeepSpeed pytest tests/integrations/test_megatron_deepspeed.py

``MEGATRON_DEEPSPEED`` names a clone at commit 4efb479d. It needs the packages in ``NEEDS`` too.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from .megatron_deepspeed_checkout import NEEDS, Checkout, Layout, Result

_PATH = os.environ.get("MEGATRON_DEEPSPEED")
_MISSING = [name for name in NEEDS if find_spec(name) is None]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(_PATH is None, reason="MEGATRON_DEEPSPEED names no checkout"),
    pytest.mark.skipif(bool(_MISSING), reason=f"Megatron-DeepSpeed needs {', '.join(_MISSING)}"),
]

BLOCK = {"slices": [50, 33, 25, 20], "timeout_s": 120}
TOLERANCE = 2e-6
BF16_TOLERANCE = 1e-4

LAYOUTS = {
    "pp2": Layout(2),
    "pp2-tp2": Layout(2, tensor=2),
    "pp2-dp2-bf16-zero1": Layout(2, data=2, bf16_zero1=True),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, extensions_built: None) -> Checkout:
    assert _PATH is not None
    return Checkout(Path(_PATH), tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stock(checkout: Checkout, name: str) -> Result:
    return checkout.run(f"{name}-stock", LAYOUTS[name])


@pytest.fixture(scope="module")
def sliced(checkout: Checkout, name: str) -> Result:
    return checkout.run(f"{name}-sliced", LAYOUTS[name], block=BLOCK)


def assert_same(found: Result, expected: Result, name: str, *, after: int = 0) -> None:
    """What was printed after an iteration is the same."""
    assert found.code == 0, found.output[-5000:]
    assert expected.code == 0, expected.output[-5000:]
    tolerance = BF16_TOLERANCE if LAYOUTS[name].bf16_zero1 else TOLERANCE
    losses = {at: loss for at, loss in expected.losses.items() if at > after}
    assert len(losses) == 4 - after
    assert found.losses == pytest.approx(losses, rel=tolerance, abs=0)
    evaluations = [(at, loss) for at, loss in expected.evaluations if at > after]
    assert len(evaluations) >= (4 - after) // 2
    assert [at for at, _ in found.evaluations] == [at for at, _ in evaluations]
    assert [loss for _, loss in found.evaluations] == pytest.approx(
        [loss for _, loss in evaluations], rel=tolerance, abs=0
    )


def test_trains_and_evaluates_as_stock(stock: Result, sliced: Result, name: str) -> None:
    assert_same(sliced, stock, name)


def test_goes_on_from_stocks_checkpoint(checkout: Checkout, stock: Result, name: str) -> None:
    assert_same(
        checkout.run(f"{name}-a", LAYOUTS[name], block=BLOCK, load=f"{name}-stock"),
        stock,
        name,
        after=2,
    )


def test_stock_goes_on_from_its_checkpoint(
    checkout: Checkout, stock: Result, sliced: Result, name: str
) -> None:
    assert_same(
        checkout.run(f"{name}-b", LAYOUTS[name], load=f"{name}-sliced"), stock, name, after=2
    )


@pytest.mark.parametrize(
    "recompute", [("selective",), ("full", "--recompute-method", "uniform")], ids=lambda it: it[0]
)
def test_recomputation(checkout: Checkout, recompute: tuple[str, ...]) -> None:
    options = ("--recompute-granularity", *recompute)
    kind = f"recompute-{recompute[0]}"
    assert_same(
        checkout.run(f"{kind}-sliced", LAYOUTS["pp2"], *options, block=BLOCK),
        checkout.run(f"{kind}-stock", LAYOUTS["pp2"], *options),
        "pp2",
    )


def test_refused(checkout: Checkout) -> None:
    result = checkout.run("refused", LAYOUTS["pp2"], "--reset-attention-mask", block=BLOCK)
    assert result.code == 1
    assert result.output.count("ConfigError: --reset-attention-mask: found True, allowed is ") == 2
