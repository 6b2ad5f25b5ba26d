"""What ranks run in the tests of refusals: one thing is changed, and the message kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from terapipe_ds.errors import TeraPipeError
from terapipe_ds.integrations.megatron_core import forward_backward_func
from terapipe_ds.models.megatron_core import TokenSliceTransformerLayer
from terapipe_ds.runtime.watchdog import Watchdog

from . import megatron_lm
from .megatron_lm import LENGTH, SEQUENCES, Setting

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]


class Wrapper(nn.Module):
    """Some wrapper of a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _set(**changes: Any) -> Change:
    return lambda arguments: arguments.update(changes)


def _configured(**changes: Any) -> Change:
    def change(arguments: Arguments) -> None:
        for name, value in changes.items():
            setattr(arguments["model"].config, name, value)

    return change


def _layer(name: str, value: Any) -> Change:
    """A changed attribute of the first layer's attention."""

    def change(arguments: Arguments) -> None:
        setattr(arguments["model"].decoder.layers[0].self_attention, name, value)

    return change


def _class(kind: type) -> Change:
    def change(arguments: Arguments) -> None:
        arguments["model"].decoder.layers[0].__class__ = kind

    return change


def _wrapped(arguments: Arguments) -> None:
    arguments["model"] = Wrapper(arguments["model"])
    arguments["model"].config = arguments["model"].module.config


def _not_gpt(arguments: Arguments) -> None:
    linear = nn.Linear(2, 2)
    linear.config, linear.model_type = arguments["model"].config, None
    arguments["model"] = linear


def _without_linear_layers(arguments: Arguments) -> None:
    """Nothing but layers of another library, which cannot be split."""
    arguments["model"].decoder.layers = nn.ModuleList()
    arguments["block"] = {**arguments["block"], "schedule": "zb-h1"}


def _steps(step: Callable[..., Any]) -> Change:
    """Another ``forward_step``."""

    def change(arguments: Arguments) -> None:
        def forward_step(iterator: Any, model: Any) -> Any:
            return step(next(iterator), model)

        arguments["forward_step_func"] = forward_step

    return change


def _called(batch: Any, model: Any, **changes: Any) -> Any:
    given = {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "attention_mask": batch["attention_mask"],
        **changes,
    }
    return model(**given), lambda output: (output.mean(), {})


def _given(**changes: Any) -> Change:
    return _steps(lambda batch, model: _called(batch, model, **changes))


def _twice(batch: Any, model: Any) -> Any:
    _called(batch, model)
    return _called(batch, model)


def _read(how: Callable[[Tensor], Any]) -> Change:
    def step(batch: Any, model: Any) -> Any:
        output, loss = _called(batch, model)
        assert output.shape == (SEQUENCES, LENGTH, megatron_lm.VOCAB)
        assert output.dtype == torch.float64
        assert output.requires_grad
        how(output)
        return output, loss

    return _steps(step)


def _something_else(batch: Any, model: Any) -> Any:
    output, loss = _called(batch, model)
    return (output,), loss


def _future_mask() -> Tensor:
    mask = torch.ones(SEQUENCES, 1, LENGTH, LENGTH).tril() < 0.5
    mask[0, 0, 3, 7] = False
    return mask


_READS = (
    r"^forward_step: found the model's output read by {}, allowed is a loss function that reads"
)

REFUSED: dict[str, tuple[Change, str]] = {
    "interleaved": (
        lambda arguments: arguments.update(model=[arguments["model"]] * 2),
        r"^virtual_pipeline_model_parallel_size: found 2 pieces of the model on a stage, allowed",
    ),
    "shapes of its own": (
        _set(adjust_tensor_shapes_fn=lambda *_: None),
        r"^adjust_tensor_shapes_fn: found a function, allowed is None",
    ),
    "encoder": (_set(decoder_seq_length=7), r"^decoder_seq_length: found 7, allowed is None or "),
    "other data in training": (
        _set(collect_non_loss_data=True),
        r"^collect_non_loss_data: found True, allowed is False in training",
    ),
    "context parallel": (
        _configured(context_parallel_size=2),
        r"^context_parallel_size: found 2, allowed is 1",
    ),
    "several tokens": (_configured(mtp_num_layers=1), r"^mtp_num_layers: found 1, allowed is None"),
    "partial checkpoints": (
        _configured(num_microbatches_with_partial_activation_checkpoints=1),
        r"^num_microbatches_with_partial_activation_checkpoints: found 1, allowed is None",
    ),
    "deferred": (
        _configured(defer_embedding_wgrad_compute=True),
        r"^defer_embedding_wgrad_compute: found True, allowed is False",
    ),
    "delayed": (
        _configured(delay_wgrad_compute=True),
        r"^delay_wgrad_compute: found True, allowed is False",
    ),
    "two at once": (
        _configured(overlap_moe_expert_parallel_comm=True),
        r"^overlap_moe_expert_parallel_comm: found True, allowed is False",
    ),
    "wrapped": (_wrapped, r"^model: found the wrapper Wrapper, allowed is megatron-core's Distr"),
    "no GPT": (_not_gpt, r"^model: found Linear, allowed is GPTModel"),
    "bidirectional": (
        _layer("attn_mask_type", AttnMaskType.padding),
        r"^attention: found attn_mask_type padding, allowed is AttnMaskType.causal",
    ),
    "other core": (
        _layer("core_attention", nn.Identity()),
        r"^layer_spec: found Identity as core attention, allowed is DotProductAttention",
    ),
    "other attention": (
        lambda arguments: setattr(
            arguments["model"].decoder.layers[0], "self_attention", nn.Identity()
        ),
        r"^layer_spec: found Identity as self-attention, allowed is SelfAttention",
    ),
    "cross attention": (
        lambda arguments: setattr(
            arguments["model"].decoder.layers[0], "cross_attention", nn.Linear(2, 2)
        ),
        r"^layer_spec: found TransformerLayer with cross attention, allowed is self-attention",
    ),
    "layers of gpt_pipeline": (
        _class(TokenSliceTransformerLayer),
        r"^layer_spec: found TokenSliceTransformerLayer with SelfAttention, which gpt_pipeline",
    ),
    "multimodal positions": (
        lambda arguments: setattr(arguments["model"], "position_embedding_type", "mrope"),
        r"^position_embedding_type: found mrope, allowed is another",
    ),
    "called twice": (_steps(_twice), r"^forward_step: found 2 calls of the model, allowed is one"),
    "not called": (
        _steps(lambda batch, model: (batch["tokens"], None)),
        r"^forward_step: found 0 calls of the model, allowed is one call",
    ),
    "something else returned": (
        _steps(_something_else),
        r"^forward_step: found something else returned than the model's output",
    ),
    "no loss function": (
        _steps(lambda batch, model: (_called(batch, model)[0], None)),
        r"^forward_step: found no loss function, allowed is one in training",
    ),
    "reads a mean": (_read(lambda output: output.mean()), _READS.format("mean")),
    "computes": (_read(lambda output: 2 * output), _READS.format(".*mul.*")),
    "reads a number": (_read(lambda output: float(output[0, 0, 0])), _READS.format(".*getitem.*")),
    "joins": (_read(lambda output: torch.cat([output])), _READS.format("cat")),
    "packed": (
        _given(packed_seq_params=object()),
        r"^forward_step: found packed_seq_params for the model, allowed is none",
    ),
    "embedded": (
        _given(decoder_input=torch.zeros(LENGTH, SEQUENCES, 16)),
        r"^forward_step: found decoder_input for the model, allowed is none",
    ),
    "looks ahead": (
        _given(attention_mask=_future_mask()),
        r"^forward_step: found an attention_mask of shape \(2, 1, 24, 24\), allowed is None or a",
    ),
    "numbers as mask": (
        _given(attention_mask=torch.zeros(1, 1, LENGTH, LENGTH)),
        r"^forward_step: found an attention_mask of shape \(1, 1, 24, 24\), allowed is None or a",
    ),
    "shapes differ": (
        _given(position_ids=torch.zeros(SEQUENCES, 5, dtype=torch.int64)),
        r"^forward_step: found position_ids of shape \(2, 5\) with others of \(2, 24\)",
    ),
    "no matrix": (
        _given(input_ids=torch.zeros(5, dtype=torch.int64)),
        r"^forward_step: found input_ids of shape \(5,\), allowed is a tensor \[sequences, tok",
    ),
    "other length": (
        _set(seq_length=30),
        r"^slices: found lengths that sum to 24, but the micro-batch has 30 tokens",
    ),
    "other sequences": (
        _set(micro_batch_size=3),
        r"^forward_step: found a micro-batch of \(sequences, tokens\) \(2, 24\), allowed is \(3, 2",
    ),
    "nothing to put off": (
        _without_linear_layers,
        r'^terapipe.schedule: found "zb-h1", allowed are "1f1b" and "gpipe" for this model',
    ),
    "groups": (
        _set(block={"slices": "[(1, [24])] * 2"}),
        r"^terapipe.loss: found a whole-sequence loss with 2 groups in a micro-batch, allowed is",
    ),
}
# Since megatron-core 0.16.
if "padding_mask" in inspect.signature(GPTModel.forward).parameters:
    REFUSED["padded"] = (
        _given(padding_mask=torch.zeros(SEQUENCES, LENGTH)),
        r"^forward_step: found padding_mask for the model, allowed is none",
    )


def refusals() -> dict[str, str]:
    """For each thing that is refused the message."""
    megatron_lm.prepare_stock()
    # It would end this rank, which goes on.
    Watchdog.announce = lambda *_: None
    setting = Setting()
    megatron_lm.initialize(setting)
    found = {}
    for name, (change, _) in REFUSED.items():
        arguments: Arguments = {
            "block": setting.block,
            "forward_step_func": None,
            "data_iterator": megatron_lm.batches(setting),
            "model": megatron_lm.model_of(setting),
            "num_microbatches": setting.micro_batches,
            "seq_length": LENGTH,
            "micro_batch_size": SEQUENCES,
        }
        _steps(_called)(arguments)
        change(arguments)
        found[name] = _message(forward_backward_func(arguments.pop("block")), arguments)
    return found


def _message(function: Any, arguments: Arguments) -> str:
    try:
        function(**arguments)
    except TeraPipeError as error:
        return str(error)
    return "nothing was raised"


def refused_on_one_rank() -> str:
    """A wrapper that one rank alone has."""
    megatron_lm.prepare_stock()
    setting = Setting(pipe=2)
    megatron_lm.initialize(setting)
    model: Any = megatron_lm.model_of(setting)
    if torch.distributed.get_rank() == 1:
        model = Wrapper(model)
        model.config = model.module.config
    try:
        megatron_lm.run(forward_backward_func(setting.block), setting, model)
    except TeraPipeError as error:
        return str(error)
    return "nothing was raised"
