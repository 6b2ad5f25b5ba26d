"""The names of megatron-core that this package stands on are there, and missed if not."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import megatron.core
import pytest

from terapipe_ds.errors import TeraPipeError
from terapipe_ds.models.megatron_seams import SEAMS, check_seams


def test_installed_megatron_has_every_name() -> None:
    check_seams()


@pytest.mark.parametrize(("owner", "name"), SEAMS, ids=lambda it: it if isinstance(it, str) else "")
def test_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    *parents, last = name.split(".")
    holder = attrgetter(".".join(parents))(owner) if parents else owner
    # Where the name is defined, not where it is inherited.
    holder = next(base for base in getattr(holder, "__mro__", (holder,)) if last in vars(base))
    monkeypatch.delattr(holder, last)
    with pytest.raises(TeraPipeError) as caught:
        check_seams()
    message = str(caught.value)
    assert f"found version {megatron.core.__version__} without " in message
    assert name in message and "\n" not in message
