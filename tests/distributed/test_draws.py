"""Sliced training equals stock DeepSpeed's in whole settings drawn at random.

``TERAPIPE_DRAWS=200`` draws more of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator
from megatron.core.transformer.transformer_config import TransformerConfig

from terapipe_ds.runtime.deepspeed_seams import recomputes_on_a_stream

from . import drawn
from .draws import CHOICES, LAYOUTS, SEED, draws, values
from .ranks import run_ranks

pytestmark = pytest.mark.distributed

_DRAWS = draws(int(os.environ.get("TERAPIPE_DRAWS", "20")))


def test_every_value_is_drawn() -> None:
    drawn_values = values([draw for listed in draws(20).values() for draw in listed])
    assert drawn_values >= {(name, value) for name, options in CHOICES.items() for value in options}


@pytest.mark.parametrize(
    "layout", list(LAYOUTS), ids=lambda sizes: "pipe{}-tensor{}-data{}".format(*sizes)
)
def test_equals_stock(layout: tuple[int, int, int], folder: Path) -> None:
    print(f"seed {SEED}")
    has_fp16 = get_accelerator().is_fp16_supported()
    # Since megatron-core 0.16.
    has_gate = hasattr(TransformerConfig, "attention_output_gate")
    listed = [
        draw
        for draw in _DRAWS[layout]
        if (has_fp16 or draw.precision != "fp16")
        and (has_gate or draw.attention != "gate")
        and not (draw.recompute == "non-reentrant" and recomputes_on_a_stream())
    ]
    pipe, tensor, data = layout
    results = run_ranks(
        drawn.compare, pipe * tensor * data, folder, listed, timeout=30 + 15 * len(listed)
    )
    for index, draw in enumerate(listed):
        gap, name = max(result.value[index] for result in results)
        assert gap <= draw.tolerance, (
            f"{name} differs by {gap:.1e} (allowed {draw.tolerance:.0e}): {draw}"
        )
