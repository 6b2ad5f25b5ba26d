"""megatron-core settings that cannot be sliced correctly, and what to change instead."""

from __future__ import annotations

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..errors import ConfigError

# Settings that would be wrong in slices, or ignored: name, the value that is right, and why.
# docs/composability.md lists them.
_REFUSED = (
    ("context_parallel_size", 1, "context parallelism cuts sequences in another way"),
    ("mtp_num_layers", None, "multi-token prediction looks across the ends of slices"),
    ("moe_expert_capacity_factor", None, "which tokens are dropped depends on the whole sequence"),
    ("moe_enable_routing_replay", False, "it replays one routing a micro-batch, not one a slice"),
    ("qk_clip", False, "attention kernels here give no largest logits"),
    ("log_max_attention_logit", False, "attention kernels here give no largest logits"),
    ("experimental_attention_variant", None, "only softmax attention is supported"),
    ("linear_attention_freq", None, "only softmax attention is supported"),
    ("heterogeneous_block_specs", False, "all layers are built from one spec"),
    ("mrope_section", None, "multimodal rotary positions are not supported"),
    ("cuda_graph_impl", "none", "a captured graph would repeat one slice's positions"),
    ("enable_cuda_graph", False, "a captured graph would repeat one slice's positions"),
    ("external_cuda_graph", False, "a captured graph would repeat one slice's positions"),
    ("cpu_offloading", False, "it counts on one forward before each backward"),
    ("fine_grained_activation_offloading", False, "it counts on one forward before each backward"),
    ("fp8", None, "its scales are kept for one forward a micro-batch"),
    ("fp4", None, "its scales are kept for one forward a micro-batch"),
)


# What megatron-core's own schedules and data-parallel wrapper do by themselves.
_REFUSED_UNDER_DEEPSPEED = (
    (
        "expert_model_parallel_size",
        1,
        "DeepSpeed's pipeline engine would sum the gradients of different experts",
    ),
    ("calculate_per_token_loss", False, "the loss is a mean over a micro-batch's valid tokens"),
)


def check_config(config: TransformerConfig, *, under_deepspeed: bool = True) -> None:
    """Raises for settings of megatron's configuration that cannot be sliced correctly.

    Args:
        config: megatron's.
        under_deepspeed: whether DeepSpeed runs the layers, or megatron's own schedules.

    Raises:
        ConfigError: names the setting, what was found and what is allowed.
    """
    window = getattr(config, "window_size", None)
    if window is not None and window[1] != 0:
        raise ConfigError(
            f"window_size: found {window}, allowed is a window that ends at the token itself, "
            f"({window[0]}, 0), since a slice cannot see later tokens; change window_size, or set "
            '"terapipe": {"enabled": false}'
        )
    _check_experts(config)
    if config.multi_latent_attention and config.apply_rope_fusion:
        raise ConfigError(
            "apply_rope_fusion: found True with multi_latent_attention, allowed is False (the "
            "fused kernel starts at position 0); change apply_rope_fusion"
        )
    refused = _REFUSED + _REFUSED_UNDER_DEEPSPEED if under_deepspeed else _REFUSED
    for name, allowed, reason in refused:
        found = getattr(config, name, allowed)
        if found != allowed:
            raise ConfigError(
                f"{name}: found {found!r}, allowed is {allowed!r} ({reason}); change {name}, or "
                'set "terapipe": {"enabled": false}'
            )


def _check_experts(config: TransformerConfig) -> None:
    if config.num_moe_experts is None:
        return
    balancing = config.moe_router_load_balancing_type
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing):
        raise ConfigError(
            "moe_router_load_balancing_type: found 'sinkhorn', allowed are 'aux_loss', "
            "'seq_aux_loss', 'global_aux_loss' and 'none' (sinkhorn routes a token by all others "
            "of its micro-batch); change moe_router_load_balancing_type, or set "
            '"terapipe": {"enabled": false}'
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel: found False with num_moe_experts {config.num_moe_experts} and "
            f"tensor_model_parallel_size {config.tensor_model_parallel_size}, allowed is True "
            "(megatron-core's experts need it); change sequence_parallel"
        )


def mask_refusal(mask_type: AttnMaskType, mask: Tensor | None) -> str:
    """Why an attention mask cannot be sliced."""
    found = f"attn_mask_type {mask_type.name}"
    if mask is not None:
        found = f"an attention_mask of shape {tuple(mask.shape)} and {mask.dtype}"
    return (
        f"attention: found {found}, allowed is AttnMaskType.causal without a mask, or with the "
        "int64 document starts [b, l] of packed sequences, because a slice cannot see later "
        "tokens; change the layer spec's attn_mask_type, or set "
        '"terapipe": {"enabled": false}'
    )
