"""What ranks run in the tests of experts, latent attention, packed documents and recomputation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_default_pg_collection,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional

from terapipe_ds.errors import ConfigError
from terapipe_ds.models.experts import TokenSliceRouter
from terapipe_ds.models.gpt import batch, document_starts, gpt_pipeline
from terapipe_ds.models.megatron_core import token_slice_layer_spec
from terapipe_ds.runtime.kv_context import SequenceContext, current_slice
from terapipe_ds.scheme import Group
from tests.conftest import SEED

from . import cases, workers
from .behaviour import BLOCK, assert_same, assert_same_gradients, small_gpt
from .workers import batches, engine_of, initialize_distributed, keep_gradients

ALL_BALANCED = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    # Large, so that a wrong one is seen.
    "moe_aux_loss_coeff": [0.5, 0.5, 0.5],
    "moe_z_loss_coeff": 0.1,
    "moe_shared_expert_intermediate_size": 16,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": functional.silu,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}


def expert_gpt(balance_over: str = "micro_batch", **config: Any) -> Any:
    return small_gpt(config={**ALL_BALANCED, **config}, balance_over=balance_over)


def auxiliary_losses(recompute: bool) -> None:
    """Gradients and what megatron's logs hold are those of stock's run; per slice they are not."""
    initialize_distributed()
    interval = {"activation_checkpoint_interval": 1 if recompute else 0}
    found = []
    for block, balance_over in ((None, "micro_batch"), (BLOCK, "micro_batch"), (BLOCK, "slice")):
        engine = engine_of(expert_gpt(balance_over), 2, block, pipeline=interval)
        kept = keep_gradients(engine)
        clear_aux_losses_tracker()
        engine.train_batch(iter(batches(2)))
        logged = {
            name: record["values"].clone()
            for name, record in get_moe_layer_wise_logging_tracker().items()
        }
        found.append((kept[0], logged))
    (expected, expected_log), (sliced, log), (by_slice, _) = found
    assert_same_gradients(sliced, expected)
    assert set(log) == set(expected_log)
    assert len(log) == 4
    for name, values in log.items():
        assert_same([values], [expected_log[name]], f"logged {name}")
    gap, _ = workers.worst(by_slice, expected)
    assert gap > 1e-3, "the auxiliary losses made no difference"


def auxiliary_losses_are_a_mean() -> None:
    """Over accumulated micro-batches they are averaged, as the loss is; stock DeepSpeed too."""
    initialize_distributed()
    for block in (None, BLOCK):
        runs = []
        for data, micro_batches in ((batches(2), 2), (batches(2)[:1], 1), (batches(2)[1:], 1)):
            # global_aux_loss depends on the micro-batches before.
            module = expert_gpt(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5)
            engine = engine_of(module, micro_batches, block)
            kept = keep_gradients(engine)
            engine.train_batch(iter(data))
            runs.append(kept[0])
        together, first, second = runs
        mean = {name: (grad + second[name]) / 2 for name, grad in first.items()}
        assert_same_gradients(together, mean)


def fp16_scales_auxiliary_losses() -> None:
    """A larger loss scale changes no gradient by more than fp16's rounding."""
    initialize_distributed()
    found = []
    for scale in (8, 1024):
        engine = engine_of(
            expert_gpt(params_dtype=torch.float16, fp16=True),
            1,
            BLOCK,
            fp16={"enabled": True, "loss_scale": scale},
            zero_optimization={"stage": 1},
            zero_allow_untested_optimizer=True,
        )
        engine.train_batch(iter(batches(1)))
        found.append([parameter.detach().float() for parameter in engine.module.parameters()])
    assert_same(found[0], found[1], "parameter", tolerance=5e-3)


def balance_over_slices() -> None:
    """Each slice's own balance, weighted by its share of the tokens; groups are allowed."""
    initialize_distributed()
    small_gpt()
    config = _config(moe_router_load_balancing_type="aux_loss", **_without_lists())
    router = TokenSliceRouter(config, get_default_pg_collection(), balance_over="slice")
    logits = torch.randn(12, 2, 4, requires_grad=True)
    context = SequenceContext(share=0.5)
    found = torch.zeros_like(logits)
    for tokens in Group(2, (5, 7)).ranges():
        own = logits.detach()[tokens.as_slice].requires_grad_()
        with current_slice(tokens, context):
            probs, _ = router.routing(own)
        (gradient,) = torch.autograd.grad(probs.sum() * 0, own)
        alone = logits.detach()[tokens.as_slice].requires_grad_()
        whole, _ = router.routing(alone)
        (expected,) = torch.autograd.grad(whole.sum() * 0, alone)
        share = 0.5 * tokens.length / 12
        assert expected.abs().max() > 1e-4
        assert (gradient - share * expected).abs().max() < 1e-7
        found[tokens.as_slice] = gradient
    assert found.abs().min() > 0
    tokens = Group(2, (5, 7)).ranges()[0]
    with current_slice(tokens, context), pytest.raises(ConfigError, match=r"^padding_mask: found"):
        router.routing(logits[:5], padding_mask=torch.zeros(5, 2, dtype=torch.bool))
    over_micro_batch = TokenSliceRouter(config, get_default_pg_collection())
    with current_slice(tokens, context), pytest.raises(ConfigError, match=r"^balance_over: found"):
        over_micro_batch.routing(logits[:5])
    engine = engine_of(expert_gpt("slice"), 2, {"slices": [[1, [48]], [1, [40, 8]]]})
    assert torch.isfinite(engine.train_batch(iter(batches(2))))


def _without_lists() -> dict[str, Any]:
    return {"moe_aux_loss_coeff": 0.5, "num_moe_experts": 4, "add_bias_linear": False}


def _config(**config: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **config
    )


def one_rank(kind: str, sequence_parallel: bool) -> dict[str, Tensor]:
    """Gradients that all tensor-parallel ranks keep whole."""
    initialize_distributed()
    ranks = torch.distributed.get_world_size()
    # Gated layers start from other weights on two ranks than on one in megatron-core 0.15.
    plain = {"gated_linear_unit": False, "moe_layer_freq": [1, 0]}
    config = {"experts": {**ALL_BALANCED, **plain}, "latent": LATENT}[kind]
    made = (MLATransformerConfig if kind == "latent" else TransformerConfig)(
        num_layers=2,
        hidden_size=cases.HIDDEN,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=True,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel and ranks > 1,
        # Initialised on the CPU, weights do not depend on the number of ranks.
        use_cpu_initialization=True,
        **config,
    )
    module = gpt_pipeline(
        made,
        vocab_size=cases.VOCAB,
        seq_length=cases.SEQ_LENGTH,
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=ranks, num_dp=1),
        seed=SEED,
    )
    engine = engine_of(module, 2, {"slices": [10, 30, 8]})
    kept = keep_gradients(engine)
    engine.train_batch(iter(batches(2)))
    return {
        name: grad
        for name, grad in kept[0].items()
        # A key's bias moves all scores of a query alike: its gradient is 0, and rounding.
        if ("norm" in name or "router" in name) and not name.endswith("k_layernorm.bias")
    }


def packed_documents() -> None:
    """Logits of packed documents are those of each document alone; sliced through documents."""
    initialize_distributed()
    lengths = [11, 20, 17]
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(1, cases.VOCAB, (1, sum(lengths)), generator=generator)
    for stop in itertools.accumulate(lengths):
        tokens[0, stop - 1] = 0
    starts = document_starts(tokens, eod=0)
    assert starts[0].tolist() == [0] * 11 + [11] * 20 + [31] * 17
    for positions in ("learned_absolute", "rope"):
        module = small_gpt(packs_documents=True, position_embedding_type=positions)
        engine = engine_of(module, 1, BLOCK, train_micro_batch_size_per_gpu=1)
        packed = batch(tokens, tokens, starts=starts)
        _, logits = engine.eval_batch(iter([packed]), return_logits=True)
        plain = engine_of(
            small_gpt(position_embedding_type=positions),
            1,
            {"slices": 1},
            train_micro_batch_size_per_gpu=1,
        )
        for start, length in zip([0, 11, 31], lengths, strict=True):
            alone = tokens[:, start : start + length]
            _, expected = plain.eval_batch(iter([batch(alone, alone)]), return_logits=True)
            if expected is None:
                continue
            found = logits[start : start + length]
            assert_same([found], [expected], "logits of the document at", tolerance=1e-5)


def full_recompute(method: str, layers: int) -> dict[str, int]:
    """megatron's full recomputation: same gradients; how often each layer ran in one step."""
    initialize_distributed()
    counts: dict[str, int] = {}
    forward = TransformerLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.layer_number] = counts.get(self.layer_number, 0) + 1
        return forward(self, *args, **kwargs)

    found = []
    for config in (
        {},
        {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": layers,
        },
    ):
        engine = engine_of(small_gpt(layers=6, config=config), 1, BLOCK)
        kept = keep_gradients(engine)
        TransformerLayer.forward = counted
        counts.clear()
        engine.train_batch(iter(batches(1)))
        TransformerLayer.forward = forward
        found.append(kept[0])
    assert_same_gradients(found[1], found[0], tolerance=1e-6)
    return counts


def layer_with_bias() -> None:
    """A transformer layer with an additive attention bias, whole and in slices, fp64."""
    initialize_distributed()
    small_gpt()
    config = _config(params_dtype=torch.float64, hidden_dropout=0.0)
    layer = build_module(token_slice_layer_spec(config), config=config, layer_number=1).double()
    inputs = torch.randn(12, 2, 32, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 4, 12, 12, dtype=torch.float64)
    whole, _ = layer(inputs, attention_mask=None, attention_bias=bias)
    weights = torch.randn_like(whole)
    (expected,) = torch.autograd.grad((whole * weights).sum(), inputs)
    plain, _ = layer(inputs, attention_mask=None)
    assert (plain - whole).abs().max() > 1e-2, "the bias made no difference"
    context = SequenceContext()
    outputs, parts = [], []
    ranges = Group(2, (5, 1, 6)).ranges()
    for tokens in ranges:
        part = inputs.detach()[tokens.as_slice].requires_grad_()
        with current_slice(tokens, context):
            output, _ = layer(part, attention_mask=None, attention_bias=bias)
        assert (output - whole[tokens.as_slice]).abs().max() < 1e-13
        outputs.append(output)
        parts.append(part)
    for tokens, part, output in reversed(list(zip(ranges, parts, outputs, strict=True))):
        with current_slice(tokens, context, backward=True):
            output.backward(weights[tokens.as_slice])
        assert (part.grad - expected[tokens.as_slice]).abs().max() < 1e-12


def loss_scale_is_handed_on() -> None:
    """The scale of auxiliary losses follows the accumulation, also when it changes."""
    initialize_distributed()
    engine = engine_of(expert_gpt(), 2, BLOCK)
    engine.train_batch(iter(batches(2)))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale == 0.5
    engine.set_train_batch_size(4 * cases.SEQUENCES)
    engine.train_batch(iter(batches(4)))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale == 0.25


def ranks_draw_by_themselves() -> list[bool]:
    """Which entries of a layer's output are 0 on this rank, under sequence parallelism."""
    initialize_distributed()
    module = small_gpt(
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1),
        dropout=0.5,
        config={"tensor_model_parallel_size": 2, "sequence_parallel": True},
    )
    layer = next(layer for layer in module.forward_funcs if hasattr(layer, "layer"))
    # Everything the layer adds is dropout of a constant.
    for name, parameter in layer.named_parameters():
        parameter.data.fill_(1.0 if name.endswith("bias") else 0.0)
    output = layer(torch.zeros(16, 2, cases.HIDDEN))
    return (output == 0).flatten().tolist()
