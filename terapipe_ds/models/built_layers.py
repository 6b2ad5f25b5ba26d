"""megatron-core's own layers, already built, on token slices.

For models that somebody else's script has built from megatron's own specs. A layer stays the object
that it is, with its parameters, hooks and place in checkpoints; its class becomes a subclass that
knows slices. Outside of slices it computes what it did. Read from megatron-core 0.16.1.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from ..errors import ConfigError
from ..runtime.attention import causal_attention
from ..runtime.kv_context import extend, get_current_slice
from .experts import TokenSliceRouter
from .megatron_core import (
    TokenSliceCoreAttention,
    TokenSliceLatentAttention,
    TokenSliceTransformerLayer,
    head_draws,
)
from .refuse import mask_refusal

_MARK = "_terapipe_ds_sliced"
_OFF = "or run with TERAPIPE=0"


def slice_layers(module: nn.Module) -> None:
    """Lets all layers of a stage see the context of the slice that is being computed.

    Calling this again changes nothing.

    Args:
        module: what :func:`check_built_layers` accepts.
    """
    for layer in module.modules():
        if type(layer) is DotProductAttention:
            layer.__class__ = SlicedDotProductAttention
        elif HAVE_TE and type(layer) is TEDotProductAttention:
            layer.__class__ = sliced_te_attention(TEDotProductAttention)
        elif type(layer) is TopKRouter:
            layer.__class__ = TokenSliceRouter
            layer.balance_over = "micro_batch"
        elif isinstance(layer, RotaryEmbedding) and not hasattr(layer, _MARK):
            layer.register_forward_pre_hook(_ask_for_whole_table, with_kwargs=True)
            layer.register_forward_hook(_own_rows)
            setattr(layer, _MARK, True)


def reads_masks(module: nn.Module) -> bool:
    """Whether attention of this stage heeds a mask; TransformerEngine's causal kernels do not."""
    return any(
        isinstance(layer, DotProductAttention | TokenSliceCoreAttention)
        for layer in module.modules()
    )


class SlicedDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that sees the sequence's earlier slices too."""

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
        """As ``DotProductAttention.forward``; in a slice the mask is its documents' starts.

        Args:
            query: ``[l, b, heads, d]``, the slice's own.
            key: ``[l, b, query groups, d]``.
            value: ``[l, b, query groups, d]``.
            attention_mask: in a slice None, or ``[b, l]`` int64: for each token the first token
                that it sees.
            attention_bias: added to the scores, ``[1 or b, 1 or heads, L, L]`` of the whole
                sequence; megatron's own has none.
        """
        if get_current_slice() is None:
            return super().forward(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type,
                attention_bias,
                packed_seq_params,
            )
        config = self.config
        dropout_p = self.attention_dropout.p if self.training else 0.0
        scaling = self.layer_number if config.apply_query_key_layer_scaling else 1
        window = self.scale_mask_softmax.window_size
        with head_draws(config, dropout_p):
            output = causal_attention(
                self,
                query,
                key,
                value,
                scale=self.softmax_scale * scaling,
                dropout_p=dropout_p,
                window=None if window is None or window[0] < 0 else window[0],
                # As in megatron's own: a window takes the mask's place.
                starts=attention_mask if window is None else None,
                bias=attention_bias,
                offset=self.softmax_offset,
            )
        return output.reshape(*output.shape[:2], -1)


@cache
def sliced_te_attention(stock: type) -> type:
    """TransformerEngine's attention that sees the sequence's earlier slices too.

    Args:
        stock: ``TEDotProductAttention``.
    """

    class SlicedTEDotProductAttention(stock):  # type: ignore[misc]
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: AttnMaskType,
            **kwargs: Any,
        ) -> Tensor:
            """As ``TEDotProductAttention.forward``."""
            current = get_current_slice()
            if current is None or current.is_whole:
                return super().forward(query, key, value, attention_mask, attn_mask_type, **kwargs)
            keys, values = extend(self, key, value, current)
            bottom_right = AttnMaskType.causal_bottom_right
            return super().forward(query, keys, values, None, bottom_right, **kwargs)

    return SlicedTEDotProductAttention


def _ask_for_whole_table(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """megatron asks for a table as long as the slice; the slice's rows may be further down."""
    current = get_current_slice()
    if current is None:
        return None
    if args:
        return (current.tokens.total, *args[1:]), kwargs
    return args, {**kwargs, "max_seq_len": current.tokens.total}


def _own_rows(rotary: nn.Module, args: Any, table: Any) -> Any:
    """The slice's rows of ``[L, 1, 1, d]``, which may come with yarn's factor."""
    current = get_current_slice()
    if current is None:
        return None
    rows = current.tokens.as_slice
    return (table[0][rows], *table[1:]) if isinstance(table, tuple) else table[rows]


def check_built_layers(module: nn.Module) -> None:
    """Raises if a layer of this stage cannot be sliced correctly.

    Args:
        module: this stage's layers.

    Raises:
        ConfigError: names what was found and what to change.
    """
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            _check_layer(layer)
        elif isinstance(layer, Router) and type(layer) not in (TopKRouter, TokenSliceRouter):
            raise _refusal(
                f"{type(layer).__name__} as router",
                "TopKRouter, whose auxiliary losses are known to add up over slices",
            )


def _check_layer(layer: TransformerLayer) -> None:
    attention = layer.self_attention
    if isinstance(layer, TokenSliceTransformerLayer) or isinstance(
        attention, TokenSliceLatentAttention
    ):
        raise _refusal(
            f"{type(layer).__name__} with {type(attention).__name__}, which gpt_pipeline runs",
            "megatron-core's own layers, since both would cut the rotary table",
        )
    if not isinstance(layer.cross_attention, IdentityOp):
        raise _refusal(f"{type(layer).__name__} with cross attention", "self-attention alone")
    if not isinstance(attention, SelfAttention | MLASelfAttention):
        raise _refusal(
            f"{type(attention).__name__} as self-attention", "SelfAttention and MLASelfAttention"
        )
    if attention.attn_mask_type is not AttnMaskType.causal:
        raise ConfigError(mask_refusal(attention.attn_mask_type, None))
    core = attention.core_attention
    known: tuple[type, ...] = (
        DotProductAttention,
        SlicedDotProductAttention,
        TokenSliceCoreAttention,
    )
    if HAVE_TE:
        known += (TEDotProductAttention, sliced_te_attention(TEDotProductAttention))
    if type(core) not in known:
        raise _refusal(
            f"{type(core).__name__} as core attention",
            "DotProductAttention and TEDotProductAttention, whose context slices can keep",
        )


def _refusal(found: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"layer_spec: found {found}, allowed is {allowed}; change the layer spec, {_OFF}"
    )


__all__ = ["check_built_layers", "reads_masks", "slice_layers", "sliced_te_attention"]
