"""The layers of a GPT, as a DeepSpeed ``PipelineModule`` runs them one after another.

Shapes: ``b`` sequences, ``l`` tokens of a slice (``L`` of the whole sequence), ``h`` hidden size,
``v`` vocabulary entries of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..runtime.kv_context import get_current_slice
from .split_backward import split_linear

Crossing = Tensor | tuple[Tensor, ...]
"""Between layers: hidden states ``[l, b, h]``, or these and the documents' starts ``[b, l]``."""


class GPTEmbedding(LanguageModelEmbedding):
    """The first layer: word and, where they are learned, position embeddings."""

    def __init__(
        self, config: TransformerConfig, *, vocab_size: int, seq_length: int, positions: str
    ) -> None:
        super().__init__(config, vocab_size, seq_length, position_embedding_type=positions)
        self.to(config.params_dtype)

    def forward(self, inputs: tuple[Tensor, ...]) -> Crossing:
        """Embeds ``(tokens, position_ids)``, each ``[b, l]``, as ``[l, b, h]``.

        Starts of documents that come with them are handed on.
        """
        tokens, position_ids, *starts = inputs
        embedded = super().forward(tokens, position_ids)
        return (embedded, *starts) if starts else embedded

    splits_backward = False
    """Whether the tied output layer puts its weight's gradient off."""

    def logits(self, inputs: Crossing) -> Tensor:
        """The tied output layer: ``[l, b, h]`` to ``[l, b, v]``."""
        hidden_states, _ = split_crossing(inputs)
        weight = self.word_embeddings.weight
        product = split_linear if self.splits_backward and weight.requires_grad else _linear
        return product(
            hidden_states,
            weight,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=parallel_state.get_tensor_model_parallel_world_size() > 1
            and not self.config.sequence_parallel,
            sequence_parallel=self.config.sequence_parallel,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


class GPTTransformerLayer(torch.nn.Module):
    """A transformer layer that takes and gives what crosses between layers of a pipeline."""

    recomputes = False
    """Whether this layer by itself is run again in backward."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        *,
        layer_number: int,
        rotary: RotaryEmbedding | None,
    ) -> None:
        super().__init__()
        self.layer: TransformerLayer = build_module(spec, config=config, layer_number=layer_number)
        self.to(config.params_dtype)
        # In a tuple, so that it is not registered: all layers of the stage share it.
        self._rotary = (rotary,)

    def forward(self, inputs: Crossing) -> Crossing:
        """``[l, b, h]`` to ``[l, b, h]``; under sequence parallelism a share of ``l``."""
        hidden_states, starts = split_crossing(inputs)
        if self.recomputes and torch.is_grad_enabled():
            output = checkpoint(self._run, hidden_states, starts)
        else:
            output = self._run(hidden_states, starts)
        return output if starts is None else (output, starts)

    def _run(self, hidden_states: Tensor, starts: Tensor | None) -> Tensor:
        with self._draws():
            output, _ = self.layer(
                hidden_states,
                attention_mask=starts,
                rotary_pos_emb=self._rotary_table(hidden_states),
            )
        return output

    def _draws(self) -> AbstractContextManager[Any]:
        """As megatron's ``TransformerBlock``: ranks with tokens of their own draw by themselves."""
        config = self.layer.config
        chances = (config.hidden_dropout, config.attention_dropout, config.moe_input_jitter_eps)
        if self.training and config.sequence_parallel and any(chances):
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return nullcontext()

    def _rotary_table(self, hidden_states: Tensor) -> Tensor | None:
        """The angles of the whole sequence, of which the layer takes its slice's."""
        (rotary,) = self._rotary
        if rotary is None:
            return None
        current = get_current_slice()
        if current is not None:
            return rotary(current.tokens.total)
        config = self.layer.config
        # Under sequence parallelism the layer is given this rank's share of the tokens.
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return rotary(shares * hidden_states.shape[0])


class GPTFinalNorm(torch.nn.Module):
    """The normalisation after the last layer, of the same kind as the layers'."""

    def __init__(self, config: TransformerConfig, spec: ModuleSpec) -> None:
        super().__init__()
        self.norm = build_module(
            spec.submodules.input_layernorm,
            config=config,
            hidden_size=config.hidden_size,
            eps=config.layernorm_epsilon,
        )
        self.to(config.params_dtype)

    def forward(self, inputs: Crossing) -> Crossing:
        """``[l, b, h]`` to ``[l, b, h]``."""
        hidden_states, starts = split_crossing(inputs)
        output = self.norm(hidden_states)
        return output if starts is None else (output, starts)


class GPTHead(torch.nn.Module):
    """An output layer with weights of its own."""

    def __init__(self, config: TransformerConfig, *, vocab_size: int) -> None:
        super().__init__()
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
        )

    def forward(self, inputs: Crossing) -> Tensor:
        """``[l, b, h]`` to ``[l, b, v]``."""
        hidden_states, _ = split_crossing(inputs)
        logits, _ = self.output_layer(hidden_states)
        return logits


def split_crossing(inputs: Crossing) -> tuple[Tensor, Tensor | None]:
    """Hidden states, and the starts of packed documents where there are any."""
    if isinstance(inputs, Tensor):
        return inputs, None
    hidden_states, starts = inputs
    return hidden_states, starts


def checkpoint(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """megatron's checkpoint, also where no input needs a gradient (after a frozen embedding).

    Without one that does, it would detach the segment, and its layers would not train.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in given):
        tensors = tuple(
            tensor.detach().requires_grad_()
            if tensor is not None and tensor.is_floating_point()
            else tensor
            for tensor in tensors
        )
    return tensor_parallel.checkpoint(function, False, *tensors)


def _linear(inputs: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    return tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
        inputs, weight, bias=None, **kwargs
    )
