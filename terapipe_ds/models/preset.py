"""A GPT's shape as a JSON file: what ``terapipe profile`` builds, and costs are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ModelPreset(BaseModel):
    """The shape of a GPT of megatron-core layers; read one with :func:`load_preset`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    seq_length: int = Field(ge=1)
    """The longest sequence, in tokens."""
    num_query_groups: int | None = Field(None, ge=1)
    """Key/value heads; as many as heads if None."""
    ffn_hidden_size: int | None = Field(None, ge=1)
    """Four times the hidden size if None."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    swiglu: bool = False
    """A gated MLP with SiLU, instead of GELU."""
    add_bias_linear: bool = True
    tied_head: bool = True
    activation_checkpoint_interval: int = Field(0, ge=0)
    """As in DeepSpeed's ``PipelineModule``: layers that are recomputed together."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelPreset:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"found hidden_size {self.hidden_size} with num_attention_heads "
                f"{self.num_attention_heads}, allowed is a multiple"
            )
        groups = self.num_query_groups or self.num_attention_heads
        if self.num_attention_heads % groups:
            raise ValueError(
                f"found num_attention_heads {self.num_attention_heads} with num_query_groups "
                f"{groups}, allowed is a multiple"
            )
        return self

    def check_profile(self, *, stages: int, granularity: int) -> None:
        """Raises if there is nothing to time.

        Raises:
            ConfigError: if a stage would have no layer, or a sequence cannot be cut.
        """
        if stages > self.num_layers:
            raise ConfigError(
                f"profile: found {stages} stages for {self.num_layers} layers, allowed is at most "
                "one stage a layer; change --stages"
            )
        if 2 * granularity > self.seq_length:
            raise ConfigError(
                f"profile: found slices of at least {granularity} tokens for sequences of "
                f"{self.seq_length}, allowed is at most half a sequence; change --granularity"
            )

    def shape(self) -> dict[str, Any]:
        """What a stage's times depend on, but for the number of its layers."""
        return self.model_dump(exclude={"num_layers", "seq_length"})

    def transformer_config(self, **changes: Any) -> TransformerConfig:
        """megatron's configuration.

        Args:
            changes: fields of it to set otherwise.
        """
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig
        from torch.nn import functional

        fields = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups or self.num_attention_heads,
            "ffn_hidden_size": self.ffn_hidden_size,
            "normalization": self.normalization,
            "gated_linear_unit": self.swiglu,
            "activation_func": functional.silu if self.swiglu else functional.gelu,
            "add_bias_linear": self.add_bias_linear,
            "params_dtype": getattr(torch, self.dtype),
            "bf16": self.dtype == "bfloat16",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        return TransformerConfig(**{**fields, **changes})


def load_preset(path: str | Path) -> ModelPreset:
    """Reads a model's JSON file.

    Raises:
        ConfigError: one line, if it cannot be read or a field is wrong.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: found {path}, which cannot be read ({error}), allowed is a JSON file as in "
            "configs/models"
        ) from None
    try:
        return ModelPreset.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"model: found a wrong {key or 'file'} in {path} ({fault['msg']}), allowed is a JSON "
            "file as in configs/models"
        ) from None
