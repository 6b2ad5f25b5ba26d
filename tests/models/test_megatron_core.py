"""What the megatron-core layer refuses, and its random states without CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from terapipe_ds.errors import ConfigError
from terapipe_ds.models.megatron_core import (
    TokenSliceCoreAttention,
    TokenSliceTransformerLayer,
    check_config,
    token_slice_layer_spec,
)
from terapipe_ds.models.without_cuda import prepare_megatron


def config(**kwargs: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **kwargs
    )


def attention(mask_type: AttnMaskType = AttnMaskType.causal, **kwargs: Any) -> Any:
    return TokenSliceCoreAttention(
        config(), layer_number=3, attn_mask_type=mask_type, attention_type="self", **kwargs
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_size", 2),
        ("num_moe_experts", 4),
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
        ("window_size", (8, 1)),
        ("softmax_type", "learnable"),
        ("attention_output_gate", True),
        ("qk_clip", True),
        ("experimental_attention_variant", "dsa"),
        ("heterogeneous_block_specs", True),
        ("mrope_section", [1, 2, 1]),
        ("calculate_per_token_loss", True),
        ("cuda_graph_impl", "local"),
        ("fp8", "hybrid"),
    ],
)
def test_settings_that_cannot_be_sliced_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: found .* allowed is .*; change {name}, or"):
        check_config(SimpleNamespace(**{name: value}))  # type: ignore[arg-type]


def test_recompute_of_whole_layers_is_deepspeeds() -> None:
    with pytest.raises(ConfigError, match="use activation_checkpoint_interval"):
        check_config(SimpleNamespace(recompute_granularity="full"))  # type: ignore[arg-type]


def test_megatrons_defaults_are_accepted() -> None:
    check_config(config())


def test_a_mask_is_refused_rather_than_ignored() -> None:
    tensors = [torch.zeros(3, 1, 4, 8) for _ in range(3)]
    with pytest.raises(ConfigError, match="found an attention_mask tensor"):
        attention()(*tensors, torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(ConfigError, match="found attn_mask_type padding"):
        attention()(*tensors, None, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ConfigError, match="found an attention bias or packed sequences"):
        attention()(*tensors, None, attention_bias=torch.zeros(1))


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
