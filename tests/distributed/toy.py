"""A pipeline that is not megatron's: batch first, several tensors between stages, two ties."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from terapipe_ds import SequenceAdapter, TensorDims
from terapipe_ds.runtime.attention import causal_attention

WIDTH = 8
TOKENS = 24
ENTRIES = 1000

Crossing = tuple[Tensor, Tensor, Tensor]
"""Hidden states ``[b, l, h]``, the tokens themselves ``[b, l]``, a constant table ``[3]``."""


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ENTRIES, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Crossing:
        return self.weight[tokens], tokens, torch.tensor([0.5, 1.0, 2.0])

    def again(self, crossing: Crossing) -> Crossing:
        hidden, tokens, table = crossing
        return hidden + table[0] * self.weight[tokens], tokens, table


class Mix(nn.Module):
    """Attends causally, with the context of earlier slices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, crossing: Crossing) -> Crossing:
        hidden, tokens, table = crossing
        projected = (hidden @ self.weight).transpose(0, 1).unsqueeze(2)
        mixed = causal_attention(self, projected, projected, projected).squeeze(2).transpose(0, 1)
        return hidden + table[1] * mixed.tanh(), tokens, table


class Out(nn.Module):
    """Gives the hidden states with the token beside them, for the loss to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, crossing: Crossing) -> Tensor:
        hidden, tokens, table = crossing
        return torch.cat((hidden @ self.weight * table[2], tokens.unsqueeze(-1).float()), dim=-1)


def checked_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Fails if an output meets the labels of another micro-batch, sequence or slice."""
    torch.testing.assert_close(outputs[..., -1], labels.float())
    return outputs[..., :-1].pow(2).mean()


class ToyPipeline(PipelineModule):
    """Reports an additional loss, as DeepSpeed allows."""

    last_additional: Tensor | None = None

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        if not self.report_additional:
            return None
        value = torch.zeros(()) if self.last_additional is None else self.last_additional
        return {"doubled": 2 * value}


def toy_pipeline(
    stages: int,
    *,
    adapter: bool = True,
    mean: bool = True,
    additional: bool = False,
    ties: bool = True,
) -> PipelineModule:
    """Seven layers; the first two are tied to later ones."""

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        loss = checked_loss(outputs, labels)
        module.last_additional = loss.detach()
        return loss

    module = ToyPipeline(
        [
            TiedLayerSpec("embed", Embed),
            TiedLayerSpec("mix", Mix) if ties else LayerSpec(Mix),
            LayerSpec(Mix),
            LayerSpec(Mix),
            TiedLayerSpec("mix", Mix) if ties else LayerSpec(Mix),
            TiedLayerSpec("embed", Embed, forward_fn=Embed.again),
            LayerSpec(Out),
        ],
        num_stages=stages,
        loss_fn=loss_fn,
        partition_method="uniform",
        seed_layers=True,
    )
    module.report_additional = additional
    if adapter:
        token = TensorDims(batch=0, sequence=1)
        module.token_slice_adapter = SequenceAdapter(
            inputs=(token,),
            labels=(token,),
            boundary=(token, token, None),
            output=token,
            mean_over_valid_tokens=mean,
        )
    return module


def toy_batches(count: int, *, sequences: int = 2, length: int = TOKENS) -> list[Any]:
    """Every token names its micro-batch, sequence and position."""
    made = []
    for index in range(count):
        numbers = torch.arange(sequences * length).view(sequences, length)
        tokens = (numbers + index * 7 * sequences * length) % ENTRIES
        made.append((tokens, tokens.clone()))
    return made
