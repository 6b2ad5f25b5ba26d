"""The language model as a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from .attention import SelfAttention
from .state import get_args


class Embedding(nn.Module):
    """Words and positions, ``[b, s]`` to ``[s, b, h]``; the mask is read elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        args = get_args()
        self.words = nn.Embedding(args.padded_vocab_size, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, position_ids, _ = inputs
        return (self.words(tokens) + self.positions(position_ids)).transpose(0, 1).contiguous()

    @property
    def words_weight(self) -> Tensor:
        return self.words.weight


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        args = get_args()
        self.before, self.between = (nn.LayerNorm(args.hidden_size) for _ in range(2))
        self.self_attention = SelfAttention(number)
        self.mlp = nn.Sequential(
            nn.Linear(args.hidden_size, 4 * args.hidden_size),
            nn.GELU(),
            nn.Linear(4 * args.hidden_size, args.hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        # The mask is the same for all, so no stage sends it to another.
        hidden = hidden + self.self_attention(self.before(hidden), get_args().attn_mask)
        return hidden + self.mlp(self.between(hidden))


class LanguageModelPipe(PipelineModule):
    def __init__(self, stages: int) -> None:
        args = get_args()
        layers = [LayerSpec(Layer, number + 1) for number in range(args.num_layers)]
        super().__init__(
            layers=[
                TiedLayerSpec("words", Embedding, tied_weight_attr="words_weight"),
                *layers,
                LayerSpec(nn.LayerNorm, args.hidden_size),
                TiedLayerSpec(
                    "words",
                    Embedding,
                    forward_fn=lambda embedding, hidden: hidden @ embedding.words_weight.t(),
                    tied_weight_attr="words_weight",
                ),
            ],
            num_stages=stages,
            loss_fn=self.loss_func,
            partition_method="uniform",
            activation_checkpoint_interval=int(args.recompute_granularity == "full"),
            checkpointable_layers=[Layer.__name__],
        )
        self.last_loss: Tensor | None = None

    def loss_func(self, output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """A mean over the tokens that the mask lets count."""
        targets, mask = labels
        targets = targets.transpose(0, 1).contiguous()
        losses = functional.cross_entropy(
            output.flatten(0, 1).float(), targets.view(-1), reduction="none"
        )
        losses = losses.view_as(targets).transpose(0, 1).contiguous()
        loss = (losses.view(-1) * mask.view(-1)).sum() / mask.sum()
        self.last_loss = loss.detach()
        return loss


def get_batch_pipe(data: dict[str, Tensor]) -> tuple[Any, Any]:
    """What the first and the last stage need of a batch ``[b, s + 1]``."""
    text = data["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    position_ids = torch.arange(length).unsqueeze(0).expand_as(tokens)
    loss_mask = (tokens % 3 > 0).float()
    return (tokens, position_ids, mask), (labels, loss_mask)
