"""Layers that sleep for as long as a cost formula says, instead of computing.

Everything else of a pipeline of them is real: engine, schedule, messages, gradients of the weights
(one factor a layer), so that the order of what runs shows in the time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

import terapipe_ds
from terapipe_ds.runtime.kv_context import get_current_slice
from terapipe_ds.runtime.weight_grads import JointWork, accumulate, owe

SEQ_LENGTH = 2048
WIDTH = 4


class Formula:
    """ms of a slice on one stage, forward and backward; close to the paper's GPT3-175B."""

    fixed_ms = 6.4

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        """As ``CostModel.time``."""
        return self.fixed_ms + 0.047 * length + 6e-7 * length * (context + length / 2)


class Dilation:
    """How much longer than the formula's times the layers sleep."""

    factor = 0.0

    def sleep(self, ms: float) -> None:
        """Sleeps for some of the formula's milliseconds."""
        if self.factor:
            time.sleep(ms * self.factor / 1e3)


class _Sleep(torch.autograd.Function):
    """Scales by a weight; sleeps for a third of the time in each product."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, dilation: Dilation, ms: float, fixed_ms: float
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.dilation, ctx.ms, ctx.fixed_ms = weight, dilation, ms / 3, fixed_ms / 3
        dilation.sleep(ctx.ms)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        weight, dilation, ms = ctx.weight, ctx.dilation, ctx.ms
        dilation.sleep(ms)
        grad_hidden = grad * weight

        nap = _Nap(weight, dilation, ms, ctx.fixed_ms, (grad * hidden).sum((0, 1)))
        if owe(nap):
            return grad_hidden, None, None, None, None
        return grad_hidden, nap.gradient([nap]), None, None, None


class _Nap(JointWork):
    """Sleeps for a slice's weight gradient, in place of computing it.

    Args:
        weight: whose gradient it is.
        dilation: of the layer.
        ms: for how long.
        fixed_ms: what of it is no longer for several slices at once.
        found: the gradient.
    """

    def __init__(
        self, weight: Tensor, dilation: Dilation, ms: float, fixed_ms: float, found: Tensor
    ) -> None:
        super().__init__(weight)
        self._dilation, self._ms, self._fixed_ms, self._found = dilation, ms, fixed_ms, found

    def do(self, works: list[_Nap]) -> None:
        accumulate(self.weight, lambda: self.gradient(works))

    def gradient(self, works: list[_Nap]) -> Tensor:
        self._dilation.sleep(sum(nap._ms for nap in works) - (len(works) - 1) * self._fixed_ms)
        return torch.stack([nap._found for nap in works]).sum(0)


class SleepingLayer(torch.nn.Module):
    """One layer of a pipeline.

    Args:
        dilation: of all layers.
        share: of a stage's time that this layer takes.
    """

    def __init__(self, dilation: Dilation, share: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.dilation, self.share = dilation, share

    def forward(self, hidden: Tensor) -> Tensor:
        """``[b, l, WIDTH]``, as its result."""
        current = get_current_slice()
        context = 0 if current is None else current.tokens.start
        ms = self.share * Formula().time(hidden.shape[1], context)
        fixed_ms = self.share * Formula.fixed_ms
        return _Sleep.apply(hidden, self.weight, self.dilation, ms, fixed_ms)


def sleeping_pipeline(dilation: Dilation, *, layers_per_stage: int = 1) -> PipelineModule:
    """A pipeline over all ranks, every stage of which takes the formula's time."""
    stages = torch.distributed.get_world_size()
    share = 1 / layers_per_stage
    module = PipelineModule(
        [LayerSpec(SleepingLayer, dilation, share) for _ in range(stages * layers_per_stage)],
        num_stages=stages,
        loss_fn=mean_square,
        partition_method="uniform",
    )
    token = terapipe_ds.TensorDims(batch=0, sequence=1)
    module.token_slice_adapter = terapipe_ds.SequenceAdapter(
        inputs=(token,),
        labels=(token,),
        boundary=(token,),
        output=token,
        mean_over_valid_tokens=True,
    )
    return module


def sleeping_engine(block: dict[str, Any] | None, dilation: Dilation, *, micro_batches: int) -> Any:
    """Stock DeepSpeed's engine, or with a ``"terapipe"`` block ours, on sleeping layers."""
    module = sleeping_pipeline(dilation)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **({} if block is None else {"terapipe": block}),
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return terapipe_ds.initialize(model=module, optimizer=optimizer, config=config)[0]


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    """A mean over all tokens."""
    return (outputs - labels).square().mean()


def sleeping_data(micro_batches: int, seq_length: int = SEQ_LENGTH) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of some micro-batches, each ``[1, seq_length, WIDTH]``."""
    generator = torch.Generator().manual_seed(1234)
    drawn = torch.randn(2, micro_batches, 1, seq_length, WIDTH, generator=generator)
    return list(zip(*drawn, strict=True))
