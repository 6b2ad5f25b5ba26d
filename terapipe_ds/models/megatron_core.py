"""megatron-core's ``TransformerLayer`` on token slices, wired by ``ModuleSpec``.

Read from megatron-core 0.16.1. The seam is ``SelfAttentionSubmodules.core_attention``: it receives
queries, keys and values after QK norm and rotary positions, so a core attention that keeps the
context of earlier slices is all that a layer needs besides the right rows of the rotary table.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ..errors import ConfigError
from ..runtime.attention import causal_attention
from ..runtime.kv_context import get_current_slice


class TokenSliceCoreAttention(torch.nn.Module):
    """Causal core attention whose keys and values include those of the sequence's earlier slices.

    Takes the place of ``megatron.core.transformer.dot_product_attention.DotProductAttention``; same
    arguments, same result.

    Args:
        config: megatron's configuration.
        layer_number: the layer, from 1; some layers may attend in a window.
        attn_mask_type: must be ``causal`` for slicing; :func:`check_layers` refuses others.
        softmax_scale: factor of the scores; ``1 / sqrt(kv_channels)`` if None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.dropout_p = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        # apply_query_key_layer_scaling divides the scores by the layer's number and multiplies them
        # again inside the softmax, in fp32, where every kernel here works anyway.
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.window = _window(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attends causally.

        Args:
            query: ``[l, b, heads, d]``, the slice's own.
            key: ``[l, b, query groups, d]``, the slice's own, positions applied.
            value: ``[l, b, query groups, d]``, the slice's own.

        Returns:
            ``[l, b, heads * d]``.

        Raises:
            ConfigError: for a mask, a bias or packed sequences, which would not be applied.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type is not AttnMaskType.causal or attention_mask is not None:
            raise ConfigError(_mask_refusal(mask_type, attention_mask))
        if attention_bias is not None or packed_seq_params is not None:
            raise ConfigError(
                "attention: found an attention bias or packed sequences, allowed is plain causal "
                'attention; drop them, or set "terapipe": {"enabled": false}'
            )
        dropout_p = self.dropout_p if self.training else 0.0
        # As megatron's own attention: each tensor-parallel rank drops weights of its own heads.
        draws = get_cuda_rng_tracker().fork() if dropout_p > 0.0 else nullcontext()
        with draws:
            output = causal_attention(
                self,
                query,
                key,
                value,
                scale=self.scale,
                dropout_p=dropout_p,
                window=self.window,
            )
        return output.reshape(*output.shape[:2], -1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How many tokens before itself a token of this layer sees; None for all."""
    skips = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, skips, layer_number):
        return None
    before, _ = config.window_size
    return before if before >= 0 else None


class TokenSliceTransformerLayer(TransformerLayer):
    """``TransformerLayer`` that may be called with one slice of a sequence after another.

    The engine marks the slice; outside of slices this is ``TransformerLayer``. Rotary positions are
    given for the whole sequence and cut here.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As ``TransformerLayer.forward``.

        Args:
            hidden_states: ``[l, b, h]``, the slice's tokens.
            rotary_pos_emb: ``[L, 1, 1, d]``, of the whole sequence.
        """
        current = get_current_slice()
        if rotary_pos_emb is not None and current is not None:
            rotary_pos_emb = rotary_pos_emb[current.tokens.start : current.tokens.stop]
        return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def token_slice_layer_spec(
    config: TransformerConfig,
    *,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
) -> ModuleSpec:
    """megatron-core's local GPT layer with a core attention that keeps the context of slices.

    Args:
        config: megatron's configuration; normalisation, QK layernorm, grouped queries, gated MLP
            and biases are taken from it.
        attn_mask_type: of the self-attention.
    """
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            qk_l2_norm=config.qk_l2_norm,
            normalization=config.normalization,
        )
    )
    spec.module = TokenSliceTransformerLayer
    attention = spec.submodules.self_attention
    attention.params = {**attention.params, "attn_mask_type": attn_mask_type}
    attention.submodules.core_attention = TokenSliceCoreAttention
    if config.sequence_parallel:
        # Without apex, megatron's local norm is torch's, which it refuses under this setting.
        for submodules, name in (
            (spec.submodules, "input_layernorm"),
            (spec.submodules, "pre_mlp_layernorm"),
            (attention.submodules, "q_layernorm"),
            (attention.submodules, "k_layernorm"),
        ):
            if getattr(submodules, name) is WrappedTorchNorm:
                setattr(submodules, name, SequenceParallelNorm)
    return spec


class SequenceParallelNorm:
    """torch's norm on a share of the tokens, its parameters marked as megatron's own are.

    Takes the place of ``megatron.core.transformer.torch_norm.WrappedTorchNorm``; same arguments.
    """

    def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = WrappedTorchNorm(alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm


# Settings whose attention or loss would be wrong in slices so far: name, the value that is right,
# and why. docs/composability.md lists them.
_REFUSED = (
    ("context_parallel_size", 1, "context parallelism cuts sequences in another way"),
    ("num_moe_experts", None, "experts are not supported with token slices yet"),
    ("multi_latent_attention", False, "it is not supported with token slices yet"),
    ("mtp_num_layers", None, "multi-token prediction looks across the ends of slices"),
    ("softmax_type", "vanilla", "a softmax offset is not supported with token slices yet"),
    ("attention_output_gate", False, "it is not supported with token slices yet"),
    ("qk_clip", False, "attention kernels here give no largest logits"),
    ("log_max_attention_logit", False, "attention kernels here give no largest logits"),
    ("experimental_attention_variant", None, "only softmax attention is supported"),
    ("linear_attention_freq", None, "only softmax attention is supported"),
    ("heterogeneous_block_specs", False, "all layers are built from one spec"),
    ("mrope_section", None, "multimodal rotary positions are not supported"),
    ("calculate_per_token_loss", False, "the loss is a mean over a micro-batch's valid tokens"),
    ("cuda_graph_impl", "none", "a captured graph would repeat one slice's positions"),
    ("enable_cuda_graph", False, "a captured graph would repeat one slice's positions"),
    ("external_cuda_graph", False, "a captured graph would repeat one slice's positions"),
    ("cpu_offloading", False, "it is not supported with token slices yet"),
    ("fp8", None, "it is not supported with token slices yet"),
    ("fp4", None, "it is not supported with token slices yet"),
)


def check_config(config: TransformerConfig) -> None:
    """Raises for settings of megatron's configuration that cannot be sliced correctly.

    Raises:
        ConfigError: names the setting, what was found and what is allowed.
    """
    if getattr(config, "recompute_granularity", None) == "full":
        raise ConfigError(
            "recompute_granularity: found 'full', allowed are 'selective' and None, since "
            "DeepSpeed recomputes whole layers here; use activation_checkpoint_interval"
        )
    window = getattr(config, "window_size", None)
    if window is not None and window[1] != 0:
        raise ConfigError(
            f"window_size: found {window}, allowed is a window that ends at the token itself, "
            f"({window[0]}, 0), since a slice cannot see later tokens; change window_size, or set "
            '"terapipe": {"enabled": false}'
        )
    for name, allowed, reason in _REFUSED:
        found = getattr(config, name, allowed)
        if found != allowed:
            raise ConfigError(
                f"{name}: found {found!r}, allowed is {allowed!r} ({reason}); change {name}, or "
                'set "terapipe": {"enabled": false}'
            )


def check_layers(module: torch.nn.Module) -> None:
    """Raises if a layer of this stage cannot be sliced correctly.

    Args:
        module: this stage's layers.

    Raises:
        ConfigError: names what was found and the setting to change.
    """
    for layer in module.modules():
        if isinstance(layer, TokenSliceCoreAttention):
            if layer.attn_mask_type is not AttnMaskType.causal:
                raise ConfigError(_mask_refusal(layer.attn_mask_type, None))
            check_config(layer.config)
        elif isinstance(layer, TransformerLayer):
            core = getattr(layer.self_attention, "core_attention", None)
            known = isinstance(layer, TokenSliceTransformerLayer)
            if not known or not isinstance(core, TokenSliceCoreAttention):
                raise ConfigError(
                    f"layer_spec: found {type(layer).__name__} with {type(core).__name__} as core "
                    "attention, allowed is TokenSliceTransformerLayer with "
                    "TokenSliceCoreAttention; build the spec with token_slice_layer_spec"
                )


def _mask_refusal(mask_type: AttnMaskType, mask: Tensor | None) -> str:
    found = f"attn_mask_type {mask_type.name}" if mask is None else "an attention_mask tensor"
    return (
        f"attention: found {found}, allowed is AttnMaskType.causal without a mask tensor, because "
        "a slice cannot see later tokens; change the layer spec's attn_mask_type, or set "
        '"terapipe": {"enabled": false}'
    )
