"""What the megatron-core layer refuses, and its random states without CUDA."""

from __future__ import annotations

from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from terapipe_ds.errors import ConfigError
from terapipe_ds.models.experts import balances_micro_batch
from terapipe_ds.models.gpt import checkpoint_interval
from terapipe_ds.models.megatron_core import (
    TokenSliceCoreAttention,
    TokenSliceTransformerLayer,
    check_layers,
    token_slice_layer_spec,
)
from terapipe_ds.models.refuse import check_config
from terapipe_ds.models.without_cuda import prepare_megatron
from terapipe_ds.versions import TESTED, Range, outside

NEWEST = Range(TESTED["megatron-core"].newest, TESTED["megatron-core"].newest)


def config(**kwargs: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **kwargs
    )


def attention(mask_type: AttnMaskType = AttnMaskType.causal, **kwargs: Any) -> Any:
    return TokenSliceCoreAttention(
        config(), layer_number=3, attn_mask_type=mask_type, attention_type="self", **kwargs
    )


def changed(**values: Any) -> TransformerConfig:
    """A configuration with values that megatron's own checks might not let pass here."""
    made = config()
    for name, value in values.items():
        if not hasattr(made, name):
            assert outside(megatron.core.__version__, NEWEST), f"megatron-core has no {name}"
            pytest.skip(f"megatron-core {megatron.core.__version__} has no {name} yet")
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_size", 2),
        ("mtp_num_layers", 1),
        ("expert_model_parallel_size", 2),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_enable_routing_replay", True),
        ("window_size", (8, 1)),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
        ("experimental_attention_variant", "dsa"),
        ("linear_attention_freq", 2),
        ("heterogeneous_block_specs", True),
        ("mrope_section", [1, 2, 1]),
        ("calculate_per_token_loss", True),
        ("cuda_graph_impl", "local"),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("cpu_offloading", True),
        ("fine_grained_activation_offloading", True),
        ("fp8", "hybrid"),
        ("fp4", "e2m1"),
    ],
)
def test_settings_that_cannot_be_sliced_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: found .* allowed is .*; change {name}, or"):
        check_config(changed(**{name: value}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "^moe_router_load_balancing_type: found 'sinkhorn', allowed are 'aux_loss'",
        ),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
            "^moe_router_load_balancing_type: found 'sinkhorn', allowed are 'aux_loss'",
        ),
        (
            {"num_moe_experts": 4, "tensor_model_parallel_size": 2},
            "^sequence_parallel: found False with num_moe_experts 4 and tensor_model_parallel_size "
            "2, allowed is True",
        ),
        (
            {"multi_latent_attention": True, "apply_rope_fusion": True},
            "^apply_rope_fusion: found True with multi_latent_attention, allowed is False",
        ),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(changed(**values))


def test_both_recomputations_of_whole_layers() -> None:
    full = config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert checkpoint_interval(full, 0) == 2
    assert checkpoint_interval(config(), 3) == 3
    with pytest.raises(ConfigError, match=r"^activation_checkpoint_interval: found 1 with recomp"):
        checkpoint_interval(full, 1)


def test_megatrons_defaults_are_accepted() -> None:
    check_config(config())
    check_config(config(num_moe_experts=4, moe_aux_loss_coeff=0.1, add_bias_linear=False))


@pytest.mark.parametrize(
    ("types", "weights", "expected"),
    [
        ("aux_loss", 0.1, True),
        ("aux_loss", 0.0, False),
        ("seq_aux_loss", 0.1, False),
        (["seq_aux_loss", "global_aux_loss"], [0.1, 0.1], True),
        (["seq_aux_loss", "global_aux_loss"], [0.1, 0.0], False),
    ],
)
def test_which_losses_need_a_whole_micro_batch(types: Any, weights: Any, expected: bool) -> None:
    made = changed(
        num_moe_experts=4, moe_router_load_balancing_type=types, moe_aux_loss_coeff=weights
    )
    assert balances_micro_batch(made) is expected
    assert not balances_micro_batch(config())


def _holds_experts(module: Any) -> bool:
    return isinstance(module, type) and issubclass(module, MoELayer)


def test_which_layers_have_experts() -> None:
    experts = {"num_moe_experts": 4, "add_bias_linear": False}

    def found(**values: Any) -> list[bool]:
        made = config(**values)
        specs = [token_slice_layer_spec(made, layer_number=number) for number in (1, 2)]
        return [_holds_experts(spec.submodules.mlp.module) for spec in specs]

    assert found() == [False, False]
    assert found(**experts) == [True, True]
    assert found(**experts, moe_layer_freq=2) == [True, False]
    assert found(**experts, moe_layer_freq=[0, 1]) == [False, True]


def test_layers_of_megatrons_own_are_refused() -> None:
    class Stage(torch.nn.Module):
        def __init__(self, layer: type[torch.nn.Module]) -> None:
            super().__init__()
            # As if megatron had built it; what is in it does not matter.
            self.layer = layer.__new__(layer)
            torch.nn.Module.__init__(self.layer)

    for layer, name in ((TopKRouter, "TokenSliceRouter"), (MLASelfAttention, "TokenSliceLatent")):
        with pytest.raises(ConfigError, match=f"^layer_spec: found .*allowed is {name}"):
            check_layers(Stage(layer))


def test_a_mask_is_refused_rather_than_ignored() -> None:
    tensors = [torch.zeros(3, 1, 4, 8) for _ in range(3)]
    with pytest.raises(ConfigError, match=r"found an attention_mask of shape \(1, 1, 3, 3\)"):
        attention()(*tensors, torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(ConfigError, match="found attn_mask_type padding"):
        attention()(*tensors, None, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ConfigError, match=r"^packed_seq_params: found some"):
        attention()(*tensors, None, packed_seq_params=object())


def test_scale() -> None:
    assert attention().scale == pytest.approx(8**-0.5)
    assert attention(softmax_scale=0.25).scale == 0.25
    scaled = TokenSliceCoreAttention(
        config(apply_query_key_layer_scaling=True),
        layer_number=4,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )
    # megatron divides by the layer's number before the softmax and multiplies inside it.
    assert scaled.scale == pytest.approx(8**-0.5)


def test_spec_changes_the_layer_and_its_core_attention_alone() -> None:
    spec = token_slice_layer_spec(config())
    assert spec.module is TokenSliceTransformerLayer
    assert spec.submodules.self_attention.submodules.core_attention is TokenSliceCoreAttention
    assert spec.submodules.self_attention.params["attn_mask_type"] is AttnMaskType.causal


def test_random_states_without_cuda() -> None:
    """A named state goes on where it stopped, and the default one is not disturbed."""
    prepare_megatron()
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork("model-parallel-rng"):
        first = torch.rand(2)
    with tracker.fork("model-parallel-rng"):
        second = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(torch.cat((first, second)), torch.rand(4, generator=generator))
    with pytest.raises(ValueError, match="added twice"):
        tracker.add("model-parallel-rng", 8)
