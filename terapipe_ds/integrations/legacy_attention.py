"""The core attention of megatron's scripts from before ``megatron.core``'s, on token slices.

Such a module gets queries, keys and values ``[s, b, heads, width]`` after positions have been
applied, and a mask that is true where a key is hidden. It is left in place, and a forward-pre-hook
gives it the keys and values of the earlier slices too and the slice's rows of the mask. A
replacement of its ``forward`` would have to compute again what it does (scaling by the layer's
number, softmax in fp32 or not, dropout under the script's own RNG tracker, whatever a subclass
adds), and would be wrong without a word where it did not. The module works on rectangles or it does
not, which is tried before training (:func:`check_core`).

Recomputation calls the hook once more. It then writes the same keys and values to the same place:
the engine marks the slice around backward too.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..runtime.kv_context import extend, get_current_slice

# What a legacy core attention has, in whatever class.
_ATTRIBUTES = (
    "hidden_size_per_partition",
    "hidden_size_per_attention_head",
    "norm_factor",
    "attn_mask_type",
    "scale_mask_softmax",
    "attention_dropout",
)
_MARK = "_terapipe_ds_hook"
_OFF = 'or set "terapipe": {"enabled": false}'
# Differences between sums of another order, in fp32 and in half precision.
_ROUNDING, _HALF_ROUNDING = 1e-4, 0.05


def is_core(module: nn.Module) -> bool:
    """Whether a module is a legacy core attention: by its attributes and its ``forward``."""
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    required = [one for one in parameters if one.default is inspect.Parameter.empty]
    return len(required) == 4


def slice_core(core: nn.Module) -> None:
    """Lets a core attention see the context of the slice that is being computed.

    Outside of slices it computes what it did. Calling this again changes nothing.
    """
    if hasattr(core, _MARK):
        return
    setattr(core, _MARK, core.register_forward_pre_hook(_with_context, with_kwargs=True))
    _keep_fused_softmax_to_squares(core.scale_mask_softmax)


def _with_context(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    current = get_current_slice()
    if current is None:
        return None
    if kwargs:
        bound = inspect.signature(core.forward).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    query, key, value, mask, *rest = args
    keys, values = extend(core, key, value, current)
    mask = cut_mask(mask, current.tokens.start, current.tokens.stop)
    return (query, keys, values, mask, *rest), kwargs


def cut_mask(mask: Tensor, start: int, stop: int) -> Tensor:
    """The rows of tokens ``[start, stop)`` and the columns of all tokens up to them.

    Args:
        mask: ``[.., L, L]``, queries by keys.

    Returns:
        ``[.., stop - start, stop]``.
    """
    return mask[..., start:stop, :stop]


def _keep_fused_softmax_to_squares(softmax: Any) -> None:
    """megatron's fused causal softmax has its mask built in, and refuses what is not a square."""
    available = getattr(softmax, "is_kernel_available", None)
    if available is None:
        return

    def is_kernel_available(mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
        return sq == sk and available(mask, b, np, sq, sk)

    softmax.is_kernel_available = is_kernel_available


def check_core(core: nn.Module, mask: Tensor) -> None:
    """Raises if a core attention does not compute the same in slices as on the whole sequence.

    Args:
        core: the module.
        mask: the script's ``[1, 1, L, L]``.

    Raises:
        ConfigError: names what was found and what to change.
    """
    kind = getattr(core.attn_mask_type, "name", str(core.attn_mask_type))
    if kind != "causal":
        raise ConfigError(
            f"attention: found attn_mask_type {kind}, allowed is causal, because a slice cannot "
            f"see later tokens; use a causal model, {_OFF}"
        )
    softmax = core.scale_mask_softmax
    fused = getattr(softmax, "scaled_masked_softmax_fusion", False)
    if fused and not hasattr(softmax, "is_kernel_available"):
        raise ConfigError(
            "masked_softmax_fusion: found a fused softmax that cannot be kept to squares, allowed "
            f"is none; add --no-masked-softmax-fusion, {_OFF}"
        )
    try:
        gap = _gap_in_slices(core, mask)
    except Exception as error:
        raise ConfigError(
            f"attention: found {type(core).__name__} that fails in slices ({error}), allowed is "
            f"one that takes fewer queries than keys; change the attention, {_OFF}"
        ) from error
    if gap > (_ROUNDING if _dtype_of(core).itemsize > 2 else _HALF_ROUNDING):
        raise ConfigError(
            f"attention: found {type(core).__name__} that is off by {gap:.1e} in slices, allowed "
            "is causal attention without positions of its own, such as alibi; change the "
            f"attention, {_OFF}"
        )


def _dtype_of(core: nn.Module) -> torch.dtype:
    if getattr(core, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(core, "fp16", False) else torch.get_default_dtype()


def _gap_in_slices(core: nn.Module, mask: Tensor) -> float:
    """How far an attention on two slices is off from that on both, of the largest entry."""
    length = min(6, mask.shape[-1])
    width = core.hidden_size_per_attention_head
    heads = core.hidden_size_per_partition // width
    draw = torch.Generator().manual_seed(1234)
    query, key, value = (
        torch.randn(length, 1, heads, width, generator=draw).to(mask.device, _dtype_of(core))
        for _ in range(3)
    )

    def rows(start: int, stop: int) -> Tensor:
        # Not through its hooks. A copy: it may use one buffer again.
        cut = cut_mask(mask, start, stop)
        return core.forward(query[start:stop], key[:stop], value[:stop], cut).clone()

    training = core.training
    core.eval()
    try:
        with torch.no_grad():
            whole = rows(0, length)
            slices = torch.cat([rows(0, length // 2), rows(length // 2, length)])
    finally:
        core.train(training)
    return float((slices - whole).abs().max() / whole.abs().max())


__all__ = ["check_core", "cut_mask", "is_core", "slice_core"]
