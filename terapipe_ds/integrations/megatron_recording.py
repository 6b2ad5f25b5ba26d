"""What a script's ``forward_step`` asks of the model, recorded instead of done.

``forward_step(data_iterator, model)`` is megatron's unit of work: it takes a micro-batch, calls the
model once, and returns the output with a loss function. It is called once a micro-batch while the
model only notes its arguments and gives a stand-in for its output. The arguments are then cut, and
the model is run slice by slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..scheme import TokenRange

_OFF = "or run with TERAPIPE=0"

# Arguments of GPTModel.forward that are [b, L].
_BY_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask")
# What every slice is given as it is: of the model, and of Float16Module around it.
_PASSED_ON = ("runtime_gather_output",)
_OF_WRAPPERS = ("fp32_output",)
_REFUSED = {
    "decoder_input": "the model embeds the tokens itself",
    "inference_context": "slices are for training and evaluation",
    "inference_params": "slices are for training and evaluation",
    "packed_seq_params": "documents packed as thd have no tokens at the same place",
    "extra_block_kwargs": "nothing is known of how to cut them",
    "padding_mask": "experts' routers do not cut it",
}


@dataclass(frozen=True)
class Recorded:
    """One micro-batch as ``forward_step`` left it.

    Attributes:
        arguments: of the model, by name.
        loss_func: from the joined output of all slices, megatron's loss and what it reports.
    """

    arguments: dict[str, Any]
    loss_func: Callable[..., Any] | None

    @property
    def shape(self) -> tuple[int, int] | None:
        """(sequences, tokens); None where no tokens were given, as on stages in the middle."""
        for name in _BY_TOKEN:
            tensor = self.arguments.get(name)
            if tensor is not None and name != "position_ids":
                return tensor.shape[0], tensor.shape[1]
        return None

    def cut(self, tokens: TokenRange) -> dict[str, Any]:
        """The model's arguments for one slice."""
        return {
            name: value[:, tokens.as_slice].contiguous() if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }


def record(
    forward_step: Callable[..., Any],
    data_iterator: Any,
    model: nn.Module,
    *,
    shape: tuple[int, int],
    heeds_masks: bool,
) -> Recorded:
    """Calls ``forward_step`` for one micro-batch.

    Args:
        forward_step: the script's.
        data_iterator: what it reads.
        model: what it calls: a ``GPTModel`` in megatron's wrappers.
        shape: (sequences, tokens), where the model is given neither tokens nor labels.
        heeds_masks: whether the model's attention reads the attention mask.

    Raises:
        ConfigError: if it does anything else than call the model once and return its output, or
            calls it with what cannot be cut.
    """
    calls: list[Recorded] = []
    outputs: list[Tensor] = []
    gpt = list(levels(model))[-1]

    def note(*args: Any, **kwargs: Any) -> Tensor:
        call = Recorded(_arguments(gpt, args, kwargs, heeds_masks=heeds_masks), None)
        calls.append(call)
        outputs.append(_stand_in(gpt, call.shape or shape, "labels" in call.arguments))
        return outputs[-1]

    with _forward_is(note, model):
        returned = forward_step(data_iterator, model)
    if len(calls) != 1:
        raise _refusal(
            f"{len(calls)} calls of the model", "one call, whose arguments are cut into slices"
        )
    if not isinstance(returned, tuple) or len(returned) != 2 or returned[0] is not outputs[0]:
        raise _refusal(
            "something else returned than the model's output and a loss function",
            "these two, since the output is there only after all slices",
        )
    return Recorded(calls[0].arguments, returned[1])


def levels(model: nn.Module) -> Iterator[nn.Module]:
    """The model's wrappers, outermost first, and the model inside."""
    yield model
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        yield inner
        model = inner


@contextmanager
def _forward_is(note: Callable[..., Any], model: nn.Module) -> Iterator[None]:
    """Inside, a call of the model, or of what its wrappers hold, is noted.

    Not by a stand-in for the model: scripts ask it for attributes and for its class.
    """
    before: list[tuple[nn.Module, Any]] = []
    for level in levels(model):
        before.append((level, vars(level).get("forward")))
        level.forward = note
    try:
        yield
    finally:
        for level, own in before:
            del level.forward
            if own is not None:
                level.forward = own


def _arguments(
    gpt: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, heeds_masks: bool
) -> dict[str, Any]:
    """The arguments by name, as the slices will get them; those that are None are left out."""
    passed_on = {name: kwargs.pop(name) for name in _OF_WRAPPERS if name in kwargs}
    bound = inspect.signature(type(gpt).forward).bind(gpt, *args, **kwargs).arguments
    given = {name: value for name, value in list(bound.items())[1:] if value is not None}
    for name, value in given.items():
        _check_argument(name, value)
    shape = Recorded(given, None).shape
    for name in _BY_TOKEN:
        tensor = given.get(name)
        if tensor is not None and shape is not None and not _fits(tensor, shape):
            raise _refusal(
                f"{name} of shape {tuple(tensor.shape)} with others of {shape}",
                "one shape (sequences, tokens)",
            )
    mask = given.pop("attention_mask", None)
    # All by keyword, and this one has no default.
    arguments: dict[str, Any] = dict.fromkeys(("input_ids", "position_ids", "attention_mask"))
    if mask is not None and heeds_masks:
        arguments["attention_mask"] = _starts(mask)
    return {**arguments, **given, **passed_on}


def _check_argument(name: str, value: Any) -> None:
    if name in _REFUSED:
        raise _refusal(f"{name} for the model", f"none ({_REFUSED[name]})")
    if name not in (*_BY_TOKEN, *_PASSED_ON, "attention_mask"):
        raise _refusal(f"{name} for the model", "the arguments of GPTModel")
    if name in _BY_TOKEN and not (isinstance(value, Tensor) and value.dim() == 2):
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
        raise _refusal(f"{name} {found}", "a tensor [sequences, tokens]")


def _fits(tensor: Tensor, shape: tuple[int, int]) -> bool:
    return tensor.shape[1] == shape[1] and tensor.shape[0] in (1, shape[0])


def _starts(mask: Any) -> Tensor | None:
    """A mask as the first token that each token sees; None where that is the sequence's first.

    Args:
        mask: ``[b or 1, 1, L, L]``, true where a key is hidden.

    Returns:
        ``[b or 1, L]`` int64.

    Raises:
        ConfigError: if a token does not see all tokens from some first one up to itself.
    """
    square = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3]
    if square and mask.dtype == torch.bool and mask.shape[1] == 1:
        hidden = mask[:, 0]
        starts = hidden.to(torch.uint8).argmin(-1)
        keys = torch.arange(mask.shape[-1], device=mask.device)
        expected = (keys > keys[:, None]) | (keys < starts[..., None])
        if torch.equal(hidden, expected):
            return starts if bool(starts.any()) else None
    found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
    raise _refusal(
        f"an attention_mask {found}",
        "None or a boolean causal mask [b, 1, L, L], of whole sequences or of documents in a row, "
        "because a slice cannot see later tokens",
    )


def _refusal(found: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"forward_step: found {found}, allowed is {allowed}; change forward_step, {_OFF}"
    )


# The stand-in


def _stand_in(gpt: Any, shape: tuple[int, int], has_labels: bool) -> Tensor:
    """What a ``GPTModel`` gives: hidden states, on the last stage losses or logits."""
    config = gpt.config
    sequences, tokens = shape
    size: tuple[int, ...] = (sequences, tokens)
    dtype = torch.float32
    if not gpt.post_process:
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        size, dtype = (tokens // shares, sequences, config.hidden_size), config.params_dtype
    elif not has_labels:
        shares = config.tensor_model_parallel_size if gpt.parallel_output else 1
        size = (sequences, tokens, gpt.vocab_size // shares)
        # Float16Module gives fp32.
        dtype = torch.float32 if config.fp16 or config.bf16 else config.params_dtype
    device = next((parameter.device for parameter in gpt.parameters()), torch.device("cpu"))
    return Tensor._make_wrapper_subclass(
        _StandIn, size, dtype=dtype, device=device, requires_grad=torch.is_grad_enabled()
    )


class _StandIn(Tensor):
    """Has the output's shape, dtype and device; its values are there only after all slices."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._refuse(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._refuse(func)

    @staticmethod
    def _refuse(func: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        raise _refusal(
            f"the model's output read by {name}",
            "a loss function that reads it, which is called with the joined output of all slices",
        )


_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    ),
}


__all__ = ["Recorded", "levels", "record"]
