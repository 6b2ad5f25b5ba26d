"""Megatron-DeepSpeed's GPT, and models built like it, on token slices with no source edited.

Read from Megatron-DeepSpeed at commit 4efb479d. A model is known by what it is, not by names of
classes: a ``PipelineModule`` whose package keeps megatron's arguments (``get_args``), with the
constant attention mask among them, and whose layers' ``self_attention`` holds a legacy core
attention (``legacy_attention.py``). What this relies on beyond that:

- The data iterator, through ``set_batch_fn``, yields ``(tokens [b, L], position_ids [b, L],
  attention_mask [1, 1, L, L]), (labels [b, L], loss_mask [b, L])``.
- One tensor ``[s, b, h]`` crosses stages; the last stage's output is ``[s, b, vocabulary]``.
- The mask crosses no stage: layers read it from the arguments. It is checked here once, and cut
  where it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from ..errors import ConfigError
from ..runtime.adapter import ATTRIBUTE, SequenceAdapter, TensorDims
from ..runtime.cost_cache import log
from .legacy_attention import check_core, is_core, slice_core
from .megatron_deepspeed_options import OFF, REFUSED, REFUSED_ABOVE_ONE, SPLIT_BACKWARD, refusal

_BATCH_FIRST = TensorDims(batch=0, sequence=1)
_SEQUENCE_FIRST = TensorDims(batch=1, sequence=0)


def adapt(model: PipelineModule) -> bool:
    """Gives a model the adapter it lacks, and its attention the context of slices, if it is known.

    Outside of slices the model stays what it was.

    Args:
        model: this rank's stages.

    Returns:
        Whether it is known.
    """
    args = _arguments_of(model)
    if args is None:
        return False
    cores = [module for module in model.modules() if is_core(module)]
    for core in cores:
        slice_core(core)
    mean = _is_mean_over_valid_tokens(model, args)
    adapter = SequenceAdapter(
        # The mask goes to every slice whole: the embedding drops it.
        inputs=(_BATCH_FIRST, _BATCH_FIRST, None),
        labels=(_BATCH_FIRST, _BATCH_FIRST),
        boundary=(_SEQUENCE_FIRST,),
        output=_SEQUENCE_FIRST,
        mean_over_valid_tokens=mean,
        token_weights=_loss_mask,
        check=partial(check, args),
        split_backward=_refuse_to_split,
        keep_random_state=_keeper_of_random_state(cores),
    )
    setattr(model, ATTRIBUTE, adapter)
    log(
        f"found {type(model).__name__}, a model like Megatron-DeepSpeed's GPT, with {len(cores)} "
        f"attention layers on this stage; its loss is taken {'per slice' if mean else 'whole'}"
    )
    return True


def check(args: Any, model: nn.Module) -> None:
    """Raises for what cannot be sliced correctly in a model of this kind.

    Args:
        args: megatron's arguments.
        model: this rank's stages.

    Raises:
        ConfigError: names the option to change.
    """
    for name, option, reason in REFUSED:
        found = getattr(args, name, None)
        if found:
            raise ConfigError(refusal(option, found, reason))
    for name, option, reason in REFUSED_ABOVE_ONE:
        found = getattr(args, name, None)
        if max(_as_list(found), default=1) > 1:
            raise ConfigError(refusal(option, found, reason))
    _check_mask(args.attn_mask, args.seq_length)
    for layer in model.modules():
        if hasattr(layer, "self_attention"):
            _check_layer(layer)
    for core in model.modules():
        if is_core(core):
            check_core(core, args.attn_mask)


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_mask(mask: Any, length: int) -> None:
    """The arguments' mask must be causal and the same for all sequences; true hides a token."""
    shape = (1, 1, length, length)
    causal = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == shape
    if causal:
        ones = torch.ones(length, length, dtype=torch.bool, device=mask.device)
        causal = torch.equal(mask[0, 0], ones.triu(1))
    if not causal:
        found = f"a mask {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ConfigError(
            f"attention: found {found} in the script's arguments (attn_mask), allowed is a boolean "
            f"causal mask {list(shape)}, since a slice cannot see later tokens; change the "
            f"script's mask, {OFF}"
        )


def _check_layer(layer: nn.Module) -> None:
    attention = layer.self_attention
    cores = [module for module in attention.modules() if is_core(module)]
    if len(cores) != 1:
        kinds = sorted({type(module).__name__ for module in attention.children()})
        raise ConfigError(
            f"attention: found {type(attention).__name__} of {', '.join(kinds) or 'no modules'}, "
            "allowed is one legacy core attention of queries, keys, values and a mask, whose "
            "context slices can keep; drop the options that change the attention (such as "
            f"--use-flash-attn and sparse or sequence-parallel attention), {OFF}"
        )
    if hasattr(layer, "inter_attention"):
        raise ConfigError(
            f"attention: found {type(layer).__name__} with a second attention over another "
            f"sequence, allowed is self-attention alone; use a decoder-only model, {OFF}"
        )


def _refuse_to_split(model: nn.Module) -> None:
    raise ConfigError(SPLIT_BACKWARD)


# The script's own functions


def _arguments_of(model: PipelineModule) -> Any:
    """Megatron's arguments, from the package that defines the model; None where there are none."""
    get_args = _function_of(type(model), "get_args")
    if get_args is None:
        return None
    try:
        args = get_args()
    except Exception:
        # Not megatron's, or not set: another script's function of this name may raise anything.
        return None
    known = all(hasattr(args, name) for name in ("attn_mask", "seq_length", "hidden_size"))
    return args if known else None


def _function_of(kind: type, name: str) -> Callable[..., Any] | None:
    """A function that the module of a class, or of one of its bases, has imported."""
    for base in kind.__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if callable(found):
            return found
    return None


def _keeper_of_random_state(
    cores: Iterable[nn.Module],
) -> Callable[[], AbstractContextManager[None]] | None:
    """Puts back the states of the script's own RNG tracker, from which its attention draws."""
    for core in cores:
        for base in type(core).__mro__:
            package = sys.modules.get(base.__module__)
            for owner in (package, getattr(package, "tensor_parallel", None)):
                get_tracker = getattr(owner, "get_cuda_rng_tracker", None)
                if callable(get_tracker):
                    return partial(_keep_states, get_tracker)
    return None


@contextmanager
def _keep_states(get_tracker: Callable[[], Any]) -> Iterator[None]:
    tracker = get_tracker()
    # A copy: a tracker's own dictionary may be what get_states gives.
    states = dict(tracker.get_states())
    try:
        yield
    finally:
        tracker.set_states(states)


# The loss


def _loss_mask(labels: Any) -> Tensor:
    return labels[1]


def _is_mean_over_valid_tokens(model: PipelineModule, args: Any) -> bool:
    """Tries the loss on a small batch, whole and in slices.

    Every rank does the same with the same numbers, since a vocabulary that is shared between
    tensor-parallel ranks makes the loss a collective.
    """
    loss_fn = model.loss_fn
    vocabulary = getattr(args, "padded_vocab_size", None)
    if loss_fn is None or not vocabulary:
        return False
    sequences, length, first = 2, 6, 2
    width = vocabulary // (getattr(args, "tensor_model_parallel_size", 1) or 1)
    device = args.attn_mask.device
    draw = torch.Generator().manual_seed(1234)
    output = torch.randn(length, sequences, width, generator=draw).to(device)
    labels = torch.randint(0, width, (sequences, length), generator=draw).to(device)
    mask = (torch.rand(sequences, length, generator=draw) < 0.6).float()
    mask[0, 0], mask[1, -1] = 1.0, 1.0
    mask = mask.to(device)

    def loss_of(start: int, stop: int) -> Tensor:
        # Copies: a loss may work in place. Its module may remember what it computed last.
        cut = labels[:, start:stop].clone(), mask[:, start:stop].clone()
        return loss_fn(output[start:stop].clone(), cut)

    remembered = dict(vars(model))
    try:
        with torch.no_grad():
            whole, *parts = (loss_of(*cut) for cut in ((0, length), (0, first), (first, length)))
        shares = mask[:, :first].sum(), mask[:, first:].sum()
        total = sum(share * part for share, part in zip(shares, parts, strict=True)) / mask.sum()
        return bool(torch.allclose(whole, total, rtol=1e-4))
    except Exception:
        # A loss of other labels: it is computed on whole sequences.
        return False
    finally:
        vars(model).clear()
        vars(model).update(remembered)


__all__ = ["adapt", "check"]
