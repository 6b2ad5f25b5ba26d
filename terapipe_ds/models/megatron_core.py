"""megatron-core's ``TransformerLayer`` on token slices, wired by ``ModuleSpec``.

Read from megatron-core 0.16.1. The seam is ``SelfAttentionSubmodules.core_attention``: it receives
queries, keys and values after QK norm and rotary positions, so a core attention that keeps the
context of earlier slices is all that a layer needs besides the right rows of the rotary table. A
layer of experts has a router that balances over slices.
"""

from __future__ import annotations

import copy
import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ..errors import ConfigError
from ..runtime.attention import causal_attention
from ..runtime.kv_context import get_current_slice
from .experts import BalanceOver, TokenSliceRouter
from .megatron_seams import put_router
from .refuse import check_config, mask_refusal
from .tensor_parallel_grads import summed


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
        k_channels: int | None = None,
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
        width = k_channels or config.kv_channels
        self.scale = 1 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.window = _window(config, layer_number)
        self.softmax_offset = _softmax_offset(config)

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
            value: ``[l, b, query groups, d]``, the slice's own; its ``d`` may differ.
            attention_mask: None, or for packed sequences ``[b, l]`` int64: for each of the slice's
                tokens the place in the sequence where its document starts, which is the first
                token that it sees.
            attention_bias: added to the scores, ``[1 or b, 1 or heads, L, L]`` of the whole
                sequence.

        Returns:
            ``[l, b, heads * d]``.

        Raises:
            ConfigError: for a mask of another kind, or megatron's ``thd`` packing, which would not
                be applied.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        starts = attention_mask
        if mask_type is not AttnMaskType.causal or (
            starts is not None and (starts.dtype != torch.int64 or starts.dim() != 2)
        ):
            raise ConfigError(mask_refusal(mask_type, attention_mask))
        if packed_seq_params is not None:
            raise ConfigError(
                "packed_seq_params: found some, allowed are sequences [b, L] whose document starts "
                "are given (gpt_pipeline's packs_documents); change how documents are packed, or "
                'set "terapipe": {"enabled": false}'
            )
        dropout_p = self.dropout_p if self.training else 0.0
        with head_draws(self.config, dropout_p):
            output = causal_attention(
                self,
                query,
                key,
                value,
                scale=self.scale,
                dropout_p=dropout_p,
                window=self.window,
                starts=starts,
                bias=attention_bias,
                offset=self.softmax_offset,
            )
        return output.reshape(*output.shape[:2], -1)


def head_draws(config: TransformerConfig, dropout_p: float) -> AbstractContextManager[Any]:
    """As megatron's own attention: each tensor-parallel rank drops weights of its own heads.

    Under sequence parallelism all of a layer draws from these states already.
    """
    if dropout_p == 0.0 or config.sequence_parallel:
        return nullcontext()
    return get_cuda_rng_tracker().fork()


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How many tokens before itself a token of this layer sees; None for all."""
    skips = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, skips, layer_number):
        return None
    before, _ = config.window_size
    return before if before >= 0 else None


def _softmax_offset(config: TransformerConfig) -> Tensor | torch.nn.Parameter | None:
    """A logit for each of this rank's heads that takes a share of its softmax, as in megatron's
    ``DotProductAttention``."""
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    offset = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
    if config.softmax_type == "off-by-one":
        return offset
    parameter = torch.nn.Parameter(offset)
    if config.perform_initialization:
        with get_cuda_rng_tracker().fork():
            config.init_method(parameter)
    # Each rank has its own heads'.
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


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


class TokenSliceLatentAttention(MLASelfAttention):
    """megatron's multi-latent attention, which looks its rotary positions up by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _SliceOfRotary(self.rotary_pos_emb)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole_latents)

    def _whole_latents(self, _: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Gathers the latents of all ranks, and sums the gradients of the keys' positions.

        All heads use these positions. megatron's own gathering, which this comes before, gives each
        rank only the gradient of its own heads (0.16.1, local spec).
        """
        latents, bias = output
        latents = gather_from_tensor_model_parallel_region(latents)
        if self.config.sequence_parallel:
            # From here on megatron does as with layers that are not cut: it gathers the tokens.
            return scatter_to_sequence_parallel_region(latents), bias
        width = self.config.kv_lora_rank
        positions = latents[..., width:].clone()
        if positions.requires_grad:
            # megatron's copy_to_tensor_model_parallel_region loses the sum where the gradient is
            # not contiguous, as here.
            positions.register_hook(summed)
        return torch.cat([latents[..., :width], positions], dim=-1), bias


class _SliceOfRotary(torch.nn.Module):
    """Gives a slice its rows of a rotary table.

    Args:
        whole: megatron's ``RotaryEmbedding`` or ``YarnRotaryEmbedding``.
    """

    def __init__(self, whole: torch.nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self.get_rotary_seq_len = whole.get_rotary_seq_len

    def forward(self, length: int, **kwargs: Any) -> Any:
        """``[l, 1, 1, d]``, and yarn's factor where there is one."""
        current = get_current_slice()
        if current is None:
            return self.whole(length, **kwargs)
        found = self.whole(current.tokens.total, **kwargs)
        rows = current.tokens.as_slice
        return (found[0][rows], *found[1:]) if isinstance(found, tuple) else found[rows]


def token_slice_layer_spec(
    config: TransformerConfig,
    *,
    layer_number: int = 1,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    balance_over: BalanceOver = "micro_batch",
) -> ModuleSpec:
    """megatron-core's local GPT layer with a core attention that keeps the context of slices.

    Args:
        config: megatron's configuration; normalisation, QK layernorm, grouped queries, latent
            attention, gated MLP, experts and biases are taken from it.
        layer_number: the layer, from 1; with ``moe_layer_freq`` some layers have no experts.
        attn_mask_type: of the self-attention.
        balance_over: what experts' auxiliary losses compare, see ``TokenSliceRouter``.
    """
    has_experts = _has_experts(config, layer_number)
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            # Since megatron-core 0.16 a setting.
            qk_l2_norm=getattr(config, "qk_l2_norm", False),
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    )
    spec.module = TokenSliceTransformerLayer
    attention = spec.submodules.self_attention
    attention.params = {**attention.params, "attn_mask_type": attn_mask_type}
    attention.submodules.core_attention = TokenSliceCoreAttention
    if config.multi_latent_attention:
        attention.module = TokenSliceLatentAttention
    if has_experts:
        router = functools.partial(TokenSliceRouter, balance_over=balance_over)
        put_router(spec.submodules.mlp, router)
    if config.sequence_parallel:
        # Without apex, megatron's local norm is torch's, which it refuses under this setting.
        for submodules in (spec.submodules, attention.submodules):
            for name, module in vars(submodules).items():
                if module is WrappedTorchNorm:
                    setattr(submodules, name, SequenceParallelNorm)
    return spec


def _has_experts(config: TransformerConfig, layer_number: int) -> bool:
    """As ``get_gpt_decoder_layer_specs`` reads ``moe_layer_freq``."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return (layer_number - 1) % pattern == 0
    return bool(pattern[layer_number - 1])


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
                raise ConfigError(mask_refusal(layer.attn_mask_type, None))
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
        elif isinstance(layer, Router) and not isinstance(layer, TokenSliceRouter):
            raise ConfigError(
                f"layer_spec: found {type(layer).__name__} as router, allowed is TokenSliceRouter, "
                "whose auxiliary losses add up over slices; build the spec with "
                "token_slice_layer_spec"
            )
        elif isinstance(layer, MLASelfAttention) and not isinstance(
            layer, TokenSliceLatentAttention
        ):
            raise ConfigError(
                f"layer_spec: found {type(layer).__name__}, allowed is TokenSliceLatentAttention, "
                "whose positions are those of the slice; build the spec with "
                "token_slice_layer_spec"
            )
