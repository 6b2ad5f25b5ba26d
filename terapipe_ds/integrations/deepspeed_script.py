"""Scripts that call ``deepspeed.initialize``: the ``"terapipe"`` block of their JSON in force.

What is rebound is ``deepspeed.initialize``, and not ``deepspeed.PipelineEngine``, which it builds:
the call sees the configuration and the model together, so that all ranks can agree on them and a
model that is no pipeline is refused instead of being trained unsliced. The engine is then chosen
where ``terapipe_ds.initialize`` chooses it. ``deepspeed.PipelineEngine`` stays DeepSpeed's, so a
script's ``isinstance`` checks hold for sliced and stock engines alike.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import BLOCK
from .after_import import after_import
from .arguments import value_of

OPTION = "--deepspeed_config"


def install(argv: Sequence[str]) -> bool:
    """Rebinds ``deepspeed.initialize`` as soon as the script has imported DeepSpeed.

    Args:
        argv: the script's arguments.

    Returns:
        Whether it applies.
    """
    if not applies(argv):
        return False
    after_import("deepspeed", rebind)
    return True


def applies(argv: Sequence[str]) -> bool:
    """Whether there may be a block: not if the JSON that ``--deepspeed_config`` names has none.

    A script may also make its configuration in code, or name it in another way.
    """
    path = value_of(OPTION, argv)
    if path is None:
        return True
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        # DeepSpeed also reads JSON with comments, and base64.
        return True
    return isinstance(content, dict) and BLOCK in content


def rebind(deepspeed: Any) -> None:
    """Lets ``deepspeed.initialize`` heed a block; without one it is as before."""
    # Here, and what follows when the script builds its engine: they need DeepSpeed.
    from ..runtime.deepspeed_seams import STOCK

    stock = deepspeed.initialize
    if hasattr(stock, STOCK):
        return

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        from ..runtime import launch

        if not launch.has_block(*args, **kwargs):
            return stock(*args, **kwargs)
        return launch.initialize(*args, **kwargs)

    setattr(initialize, STOCK, stock)
    deepspeed.initialize = initialize


__all__ = ["applies", "install", "rebind"]
