"""What ranks run in the tests of integrations: the stand-in, stock and sliced, one seam broken."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

import terapipe_ds
from terapipe_ds.files import CACHE_VARIABLE
from terapipe_ds.integrations import deepspeed_script, legacy_attention, megatron_deepspeed
from terapipe_ds.runtime import kv_context
from terapipe_ds.runtime.adapter import ATTRIBUTE, SequenceAdapter, TensorDims
from terapipe_ds.runtime.deepspeed_seams import recomputes_on_a_stream

from .standin import train
from .standin.legacy import attention, model, state

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10**9,
    "gradient_clipping": 0.0,
}
BLOCK = {"slices": [17, 5, 15, 11], "timeout_s": 60}


def write_config(folder: Path, block: Any = BLOCK) -> str:
    """A DeepSpeed JSON, with a block unless that is None."""
    path = folder / ("stock.json" if block is None else "sliced.json")
    path.write_text(json.dumps(CONFIG if block is None else {**CONFIG, "terapipe": block}))
    return str(path)


def run_script(config: str, *arguments: str) -> dict[str, Any]:
    """The stand-in in this process."""
    return train.train(train.parse(["--deepspeed_config", config, *arguments]))


def stock_and_checkpoints(folder: Path) -> dict[str, Any]:
    """Stock's results; and each kind continued from the other's checkpoint."""
    stock, sliced = write_config(folder, None), write_config(folder)
    saved = str(folder / "stock"), str(folder / "sliced")
    found = {"stock": run_script(stock, "--train-iters", "5")}
    run_script(stock, "--train-iters", "3", "--save", saved[0])
    deepspeed_script.rebind(deepspeed)
    run_script(sliced, "--train-iters", "3", "--save", saved[1])
    found["sliced from stock"] = run_script(sliced, "--train-iters", "2", "--load", saved[0])
    found["stock from sliced"] = run_script(stock, "--train-iters", "2", "--load", saved[1])
    return found


VARIANTS = {
    "plain": (),
    "fused softmax": ("--masked-softmax-fusion",),
    "selective recompute": ("--recompute-granularity", "selective"),
    "full recompute": ("--recompute-granularity", "full"),
}


def variants(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Stock's and the sliced results of each variant."""
    stock, sliced = write_config(folder, None), write_config(folder)
    deepspeed_script.rebind(deepspeed)
    return {
        name: (run_script(stock, *arguments), run_script(sliced, *arguments))
        for name, arguments in VARIANTS.items()
        # At which some releases fail on a CPU, stock too.
        if name != "full recompute" or not recomputes_on_a_stream()
    }


# Seams, each broken in the way that would go unseen


def _no_context(patch: pytest.MonkeyPatch) -> None:
    """Earlier slices are there, but hold nothing."""

    def extend(owner: Any, key: Tensor, value: Tensor, current: Any, **_: Any) -> Any:
        empty = [0, 0, 0, 0, 0, 0, current.tokens.start, 0]
        return tuple(torch.nn.functional.pad(tensor, empty) for tensor in (key, value))

    patch.setattr(legacy_attention, "extend", extend)


def _no_context_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_context.LayerKV, "exchange_gradients", lambda *_, **__: [None, None])


def _first_rows_of_the_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        legacy_attention, "cut_mask", lambda mask, start, stop: mask[..., : stop - start, :stop]
    )
    patch.setattr(megatron_deepspeed, "check_core", lambda *_: None)


def _whole_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(legacy_attention, "cut_mask", lambda mask, *_: mask)
    patch.setattr(megatron_deepspeed, "check_core", lambda *_: None)


def _no_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(megatron_deepspeed, "slice_core", lambda core: None)


class _FromTheStart(TensorDims):
    def cut(self, tensor: Tensor, rows: slice, tokens: slice) -> Tensor:
        return super().cut(tensor, rows, slice(0, tokens.stop - tokens.start))


def _changed_adapter(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    adapt = megatron_deepspeed.adapt

    def adapt_and_change(module: Any) -> bool:
        known = adapt(module)
        setattr(module, ATTRIBUTE, dataclasses.replace(getattr(module, ATTRIBUTE), **changes))
        return known

    patch.setattr(megatron_deepspeed, "adapt", adapt_and_change)


_TOKENS, _FIRST = TensorDims(batch=0, sequence=1), _FromTheStart(batch=0, sequence=1)


def _first_position_ids(patch: pytest.MonkeyPatch) -> None:
    _changed_adapter(patch, inputs=(_TOKENS, _FIRST, None))


def _first_tokens(patch: pytest.MonkeyPatch) -> None:
    _changed_adapter(patch, inputs=(_FIRST, _TOKENS, None))


def _first_labels(patch: pytest.MonkeyPatch) -> None:
    _changed_adapter(patch, labels=(_FIRST, _TOKENS))


def _first_loss_mask(patch: pytest.MonkeyPatch) -> None:
    _changed_adapter(patch, labels=(_TOKENS, _FIRST))


def _all_tokens_weigh_alike(patch: pytest.MonkeyPatch) -> None:
    _changed_adapter(patch, token_weights=None)


def _labels_as_views(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Any, tensors: Any, dims: Any, rows: slice, tokens: slice) -> Any:
        return tuple(
            tensor if dim is None else dim.cut(tensor, rows, tokens)
            for tensor, dim in zip(tensors, dims, strict=True)
        )

    patch.setattr(SequenceAdapter, "cut", cut)


def _not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(megatron_deepspeed, "adapt", lambda module: False)


def _fused_softmax_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(legacy_attention, "_keep_fused_softmax_to_squares", lambda softmax: None)


Seam = tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]

# Broken, these give other numbers without a word.
SILENT: dict[str, Seam] = {
    "no context": (_no_context, ()),
    "no context under recompute": (_no_context, VARIANTS["selective recompute"]),
    "no gradient to the context": (_no_context_gradients, ()),
    "the mask's first rows": (_first_rows_of_the_mask, ()),
    "the first tokens": (_first_tokens, ()),
    "the first position ids": (_first_position_ids, ()),
    "the first labels": (_first_labels, ()),
    "the first loss mask": (_first_loss_mask, ()),
    "all tokens weigh alike": (_all_tokens_weigh_alike, ()),
}
# These fail.
LOUD: dict[str, Seam] = {
    "the whole mask": (_whole_mask, ()),
    "no hooks": (_no_hooks, ()),
    "labels as views": (_labels_as_views, ()),
    "not recognised": (_not_recognised, ()),
    "the fused softmax on rectangles": (_fused_softmax_anywhere, VARIANTS["fused softmax"]),
}


def silent(folder: Path) -> dict[str, dict[str, Any]]:
    """The sliced results with each silent seam broken."""
    deepspeed_script.rebind(deepspeed)
    return {name: _broken(folder, seam) for name, seam in SILENT.items()}


def loud(folder: Path, name: str) -> None:
    """Sliced training with a seam broken that cannot go on."""
    deepspeed_script.rebind(deepspeed)
    _broken(folder, LOUD[name])


def _broken(folder: Path, seam: Seam) -> dict[str, Any]:
    breaks, arguments = seam
    patch = pytest.MonkeyPatch()
    breaks(patch)
    try:
        return run_script(write_config(folder), *arguments)
    finally:
        patch.undo()


# Plans


def auto_leaves_no_trace(folder: Path) -> None:
    """Training after a profile equals training with the planned slices given, dropout included."""
    os.environ[CACHE_VARIABLE] = str(folder)
    deepspeed_script.rebind(deepspeed)
    options = ("--attention-dropout", "0.1")
    states = dict(state.get_cuda_rng_tracker().get_states())
    block = {"slices": "auto", "profile_budget_s": 0.1, "timeout_s": 60}
    args = train.parse(["--deepspeed_config", write_config(folder, block), *options])
    engine = train.set_up(args)
    batches = train.data(1, args)
    found = [engine.train_batch(batches).item() for _ in range(args.train_iters)]
    (plan,) = engine.plans.values()
    state.get_cuda_rng_tracker().set_states(states)
    block = {**BLOCK, "slices": str(plan.scheme)}
    expected = run_script(write_config(folder, block), *options)["losses"]
    assert found == expected, (str(plan.scheme), found, expected)


# Refusals


def _bidirectional(patch: pytest.MonkeyPatch) -> None:
    init = attention.ScoresAndValues.__init__
    patch.setattr(
        attention.ScoresAndValues,
        "__init__",
        lambda self, number: init(self, number, attention.MaskKind.padding),
    )


def _own_positions(patch: pytest.MonkeyPatch) -> None:
    """Scores that depend on how many keys a query is given."""
    forward = attention.SoftmaxOfMaskedScores.forward

    def with_bias(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        far = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2]).unsqueeze(-1)
        return forward(self, scores - 0.1 * far.abs(), mask)

    patch.setattr(attention.SoftmaxOfMaskedScores, "forward", with_bias)


def _ignores_the_mask(patch: pytest.MonkeyPatch) -> None:
    forward = attention.SoftmaxOfMaskedScores.forward
    patch.setattr(
        attention.SoftmaxOfMaskedScores,
        "forward",
        lambda self, scores, mask: forward(self, scores, torch.zeros_like(mask)),
    )


def _other_attention(patch: pytest.MonkeyPatch) -> None:
    """Without one of the attributes by which a core attention is known."""
    init = attention.ScoresAndValues.__init__

    def without(self: Any, number: int) -> None:
        init(self, number)
        del self.norm_factor

    patch.setattr(attention.ScoresAndValues, "__init__", without)


def _other_mask(patch: pytest.MonkeyPatch) -> None:
    """Some tokens of the mask see one token less."""
    tril = Tensor.tril
    patch.setattr(Tensor, "tril", lambda tensor: tril(tensor, -1))


def _option(*options: str) -> Seam:
    return (lambda patch: None), options


def _argument(name: str, value: Any) -> Seam:
    parse = train.parse

    def change(patch: pytest.MonkeyPatch) -> None:
        def parse_and_set(argv: Any) -> Any:
            args = parse(argv)
            setattr(args, name, value)
            return args

        patch.setattr(train, "parse", parse_and_set)

    return change, ()


REFUSED = {
    "bidirectional": ((_bidirectional, ()), r"found attn_mask_type padding, allowed is causal"),
    "own positions": ((_own_positions, ()), r"found ScoresAndValues\w* that is off by"),
    "ignores the mask": ((_ignores_the_mask, ()), r"found ScoresAndValues\w* that is off by"),
    "other attention": ((_other_attention, ()), r"found SelfAttention of .*--use-flash-attn"),
    "other mask": ((_other_mask, ()), r"found a mask \(1, 1, 48, 48\) .*\(attn_mask\)"),
    "zb-h1": (_option(), r'^ConfigError: terapipe\.schedule: found "zb-h1", allowed are "1f1b" '),
    "reset mask": (_option("--reset-attention-mask"), r"^ConfigError: --reset-attention-mask: "),
    **{
        name: (_argument(name, value), rf"^ConfigError: {option}: found .* drop {option}, ")
        for name, value, option in (
            ("use_flash_attn", True, "--use-flash-attn"),
            ("use_flash_attn_v1", True, "--use-flash-attn-v1"),
            ("use_flash_attn_v2", True, "--use-flash-attn-v2"),
            ("use_flash_attn_triton", True, "--use-flash-attn-triton"),
            ("use_flash_attn_builder", True, "--use-flash-attn-builder"),
            ("use_rotary_position_embeddings", True, "--use-rotary-position-embeddings"),
            ("sequence_parallel", True, "--sequence-parallel"),
            ("ds_sequence_parallel_size", 2, "--ds-sequence-parallel-size"),
            ("force_ds_sequence_parallel", True, "--force-ds-sequence-parallel"),
            ("ds_sequence_parallel_fpdt", True, "--ds-sequence-parallel-fpdt"),
            ("num_experts", [4], "--num-experts"),
            ("num_experts_switch", 4, "--num-experts-switch"),
            ("retro_add_retriever", True, "--retro-add-retriever"),
            ("random_ltd", True, "--random-ltd"),
            ("curriculum_learning_legacy", True, "curriculum_learning in the DeepSpeed JSON"),
            (
                "data_efficiency_curriculum_learning",
                True,
                "--data-efficiency-curriculum-learning",
            ),
        )
    },
}


def refusals(folder: Path) -> dict[str, str]:
    """For each thing that is refused the message."""
    deepspeed_script.rebind(deepspeed)
    found = {}
    for name, ((change, options), _) in REFUSED.items():
        block = {**BLOCK, "schedule": "zb-h1"} if name == "zb-h1" else BLOCK
        config = write_config(folder, block)
        patch = pytest.MonkeyPatch()
        change(patch)
        try:
            run_script(config, *options)
        except terapipe_ds.ConfigError as error:
            found[name] = f"ConfigError: {error}"
        finally:
            patch.undo()
    return found


def whole_sequence_for_another_loss(folder: Path) -> tuple[Any, Any]:
    """A loss that is no mean over valid tokens is computed once, and is equal too."""

    def sum_of_losses(self: Any, output: Tensor, labels: Any) -> Tensor:
        return mean(self, output, labels) * labels[1].sum().sqrt()

    mean = model.LanguageModelPipe.loss_func
    model.LanguageModelPipe.loss_func = sum_of_losses
    deepspeed_script.rebind(deepspeed)
    return run_script(write_config(folder, None)), run_script(write_config(folder))
