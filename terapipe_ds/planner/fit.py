"""Fits the cost model to measured slices, and says how well it predicts slices it has not seen.

Forms, from the paper's to what measurements may favour:

- ``paper``: the base as measured without context, then ``a0 + a1 l + a2 c + a3 l c`` by least
  squares on what context adds;
- ``joint``: the same model, base and context fitted together, so that slices with context make the
  base less noisy;
- ``causal``: as ``joint``, with attention to a slice's own tokens as an ``l^2`` term tied to the
  context's (each token sees half of its slice on average), so that lengths between the measured
  ones are not taken for a straight line;
- ``floor``: as ``causal``, with a base that is flat up to some number of tokens, then a line;
- ``table``: as ``causal``, with a price of context for each measured length instead of
  ``a2 + a3 l``, for attention kernels that change their tiling with the length.

The form with the smallest median error on the held-out samples is taken. Errors are relative, in
the fit as in the judgement: a short slice counts as much as a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .cost import Fit, Sample, StageCost, interpolate
from .memory import StageMemory

Floats = NDArray[np.float64]
Prices = Sequence[float] | Floats

_TINY_MS = 1e-6


def fit_stage(
    name: str, samples: Sequence[Sample], *, memory: StageMemory | None = None
) -> StageCost:
    """Fits forward and backward of one stage.

    Args:
        name: of the stage.
        samples: what was measured, some of it held out, some of it without context.
        memory: what its ranks hold, to go with it.

    Raises:
        ConfigError: if there is too little to fit.
    """
    seen = [sample for sample in samples if not sample.held_out]
    if len({sample.sequences * sample.length for sample in seen if sample.context == 0}) < 2:
        raise ConfigError(
            "cost: found measurements of fewer than 2 lengths without context, allowed are at "
            "least 2; give the profiler a larger budget"
        )
    columns = _Columns.of(seen)
    fits = {}
    for form, fit in _FORMS.items():
        forward = fit(columns, _times([sample.forward_ms for sample in seen]))
        backward = fit(columns, _times([sample.backward_ms for sample in seen]))
        fits[form] = (forward, backward)
    held_out = [sample for sample in samples if sample.held_out]
    errors = {form: median_error(fit, held_out or seen) for form, fit in fits.items()}
    best = min(errors, key=lambda form: errors[form])
    forward, backward = fits[best]
    weight = None
    if any(sample.weight_ms for sample in seen):
        weight = _FORMS[best](columns, _times([sample.weight_ms for sample in seen]))
    return StageCost(
        name=name,
        forward=forward,
        backward=backward,
        error=errors[best] if held_out else None,
        errors=errors if held_out else {},
        samples=tuple(samples),
        memory=memory,
        weight=weight,
    )


def median_error(fit: tuple[Fit, Fit], samples: Sequence[Sample]) -> float:
    """Median of ``|predicted - measured| / measured``, forward and backward together."""
    columns = _Columns.of(samples)
    predicted = sum(each(columns.length, columns.context, columns.sequences) for each in fit)
    measured = _times([sample.forward_ms + sample.backward_ms for sample in samples])
    return float(np.median(np.abs(predicted - measured) / measured))


def _times(values: Sequence[float]) -> Floats:
    """In ms; never 0, since errors are relative to them."""
    return np.maximum(np.array(values, dtype=np.float64), _TINY_MS)


class _Columns:
    """Samples as columns."""

    def __init__(self, length: Floats, context: Floats, sequences: Floats) -> None:
        self.length, self.context, self.sequences = length, context, sequences
        self.tokens = sequences * length
        self.has_context = (context > 0).astype(np.float64)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Columns:
        columns = np.array([sample[:3] for sample in samples], dtype=np.float64)
        return cls(*columns.T)

    def jump_terms(self) -> list[Floats]:
        """What ``a0`` and ``a1`` multiply."""
        return [self.has_context, self.has_context * self.tokens]

    def price_terms(self, corners: Prices, own_share: float) -> list[Floats]:
        """What the price at each corner multiplies."""
        seen = self.sequences * (self.context + own_share * self.length)
        return [interpolate(self.length, corners, row) * seen for row in np.eye(len(corners))]


# Two corners make the line a2 + a3 l; it goes on beyond the second.
_LINE = (0.0, 1024.0)


def _paper(columns: _Columns, times: Floats) -> Fit:
    first = columns.context == 0
    corners = np.unique(columns.tokens[first])
    base = np.array([np.median(times[first & (columns.tokens == n)]) for n in corners])
    if first.all():
        return _fit("paper", times, corners, base)
    rest = times - Fit("paper", tuple(corners), tuple(base))(columns.length, 0.0, columns.sequences)
    terms = columns.jump_terms() + columns.price_terms(_LINE, 0.0)
    solution = _least_squares([term[~first] for term in terms], rest[~first], 1 / times[~first])
    return _fit("paper", times, corners, base, solution, _LINE)


def _joint(columns: _Columns, times: Floats) -> Fit:
    return _with_corners("joint", columns, times, _LINE, own_share=0.0)


def _causal(columns: _Columns, times: Floats) -> Fit:
    return _with_corners("causal", columns, times, _LINE, own_share=0.5)


def _table(columns: _Columns, times: Floats) -> Fit:
    lengths = np.unique(columns.length[columns.context > 0])
    # A price needs two contexts to be told from the base.
    known = [n for n in lengths if len(np.unique(columns.context[columns.length == n])) > 1]
    prices = _apart(np.array(known)) if len(known) > 1 else np.array(_LINE)
    prices = prices if len(prices) > 1 else np.array(_LINE)
    return _with_corners("table", columns, times, prices, own_share=0.5)


def _with_corners(
    form: str, columns: _Columns, times: Floats, prices: Prices, *, own_share: float
) -> Fit:
    corners = _apart(columns.tokens)
    hats = [interpolate(columns.tokens, corners, row) for row in np.eye(len(corners))]
    terms = hats + columns.jump_terms() + columns.price_terms(prices, own_share)
    solution = _least_squares(terms, times, 1 / times)
    base, rest = solution[: len(corners)], solution[len(corners) :]
    return _fit(form, times, corners, base, rest, prices, own_share)


def _apart(values: Floats) -> Floats:
    """The different values, without those that are almost the same as one before."""
    kept: list[float] = []
    for value in np.unique(values):
        if not kept or value > kept[-1] * 1.05:
            kept.append(float(value))
    return np.array(kept)


def _floor(columns: _Columns, times: Floats) -> Fit:
    """A base that is flat up to one of the measured token counts, then a line."""
    corners = np.unique(columns.tokens)
    best: tuple[float, Fit] | None = None
    for knee in corners[:-1]:
        line = np.maximum(columns.tokens, knee)
        terms = [np.ones_like(line), line]
        terms += columns.jump_terms() + columns.price_terms(_LINE, 0.5)
        solution = _least_squares(terms, times, 1 / times)
        ends = np.array([knee, corners[-1]])
        base = solution[0] + solution[1] * ends
        fit = _fit("floor", times, ends, base, solution[2:], _LINE, 0.5)
        predicted = fit(columns.length, columns.context, columns.sequences)
        residual = float(np.sum(((predicted - times) / times) ** 2))
        if best is None or residual < best[0]:
            best = residual, fit
    assert best is not None, "at least two token counts"
    return best[1]


_FORMS: dict[str, Callable[[_Columns, Floats], Fit]] = {
    "paper": _paper,
    "joint": _joint,
    "causal": _causal,
    "floor": _floor,
    "table": _table,
}


def _least_squares(terms: Sequence[Floats], times: Floats, weights: Floats) -> Floats:
    matrix = np.stack(terms, axis=1) * weights[:, None]
    # Columns of one size: the least-norm solution must not prefer a term for its units.
    scale = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(np.float64).tiny)
    solution: Floats = np.linalg.lstsq(matrix / scale, times * weights, rcond=1e-10)[0]
    unscaled: Floats = solution / scale
    return unscaled


def _fit(
    form: str,
    times: Floats,
    corners: Floats,
    base: Floats,
    rest: Floats | None = None,
    prices: Prices = (0.0,),
    own_share: float = 0.0,
) -> Fit:
    """A fit from a solution: ``rest`` is ``a0, a1`` and the prices."""
    solved = [0.0] * (2 + len(prices)) if rest is None else [float(value) for value in rest]
    return Fit(
        form=form,
        tokens=tuple(float(n) for n in corners),
        base_ms=tuple(float(ms) for ms in base),
        jump=(solved[0], solved[1]),
        lengths=tuple(float(length) for length in prices),
        price_ms=tuple(solved[2:]),
        own_share=own_share,
        # Not down to nothing below what was measured.
        least_ms=float(times.min()) / 2,
    )


__all__ = ["fit_stage", "median_error"]
