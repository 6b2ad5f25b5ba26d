"""A megatron pipeline stage's neighbours, and the slices that go to them and come from them.

megatron's own point-to-point functions pair a send with a receive; slices need receives that are
posted ahead, and messages of many lengths. So each pair of neighbours has groups of its own
(``runtime/channel.py``). What crosses is known without a word: ``[l, b, h]`` in
``pipeline_dtype``, under sequence parallelism a share of ``l``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ..errors import TeraPipeError
from ..runtime.adapter import TensorDims
from ..runtime.boundary import Boundary
from ..runtime.channel import Peer, RecvChannel, SendChannel, Slot, links
from ..runtime.torch_seams import default_store
from ..runtime.watchdog import Watchdog

_SEQUENCE_FIRST = TensorDims(batch=1, sequence=0)


class Neighbours:
    """This rank's place in a pipeline, and its channels.

    Args:
        group: megatron's process group of the pipeline, first stage to last.
        timeout_s: the longest wait for another rank.
        device: where tensors live.
    """

    def __init__(self, group: Any, *, timeout_s: float, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stage, self.stages = group.rank(), group.size()
        rank = torch.distributed.get_rank()
        self.watchdog = Watchdog(
            f"rank {rank} (stage {self.stage})",
            timeout_s=timeout_s,
            # Its own connection: the main thread may block in a call on the shared one.
            store=default_store().clone(),
        )
        ranks = torch.distributed.get_process_group_ranks(group)
        before = None if self.is_first else Peer(ranks[self.stage - 1], self.stage - 1)
        after = None if self.is_last else Peer(ranks[self.stage + 1], self.stage + 1)
        with self.watchdog.step():
            upstream, downstream = links(
                rank,
                self.stage,
                upstream=before,
                downstream=after,
                watchdog=self.watchdog,
                device=device,
            )
        if upstream is not None:
            peer, forward, backward = upstream
            self._inputs = RecvChannel("activation", peer, forward, self.watchdog, device)
            self._input_grads = SendChannel("gradient", peer, backward, self.watchdog)
        if downstream is not None:
            peer, forward, backward = downstream
            self._outputs = SendChannel("activation", peer, forward, self.watchdog)
            self._output_grads = RecvChannel("gradient", peer, backward, self.watchdog, device)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Watches a step, and lets no other rank wait for one that failed."""
        try:
            with self.watchdog.step():
                yield
        except Exception as error:
            self.watchdog.announce(f"{type(error).__name__}: {error}")
            raise

    def begin(
        self, boundary: Boundary, forwards: Iterable[Slot], backwards: Iterable[Slot]
    ) -> None:
        """Posts the first receives of a step.

        Args:
            boundary: what crosses.
            forwards: the slices in the order of their forwards.
            backwards: in the order of their backwards.
        """
        self._boundary = boundary
        if not self.is_first:
            self._inputs.begin(forwards, boundary)
        if not self.is_last:
            self._output_grads.begin(backwards, boundary)

    def receive_input(self) -> Tensor | None:
        """The next slice's ``[l, b, h]``, a leaf that gets a gradient; None on the first stage."""
        if self.is_first:
            return None
        (tensor,) = self._inputs.receive()
        return tensor.requires_grad_()

    def send_output(self, output: Tensor, slot: Slot) -> None:
        """Posts a slice's output; the last stage has nobody to send to.

        Raises:
            TeraPipeError: if it is not what the next stage expects.
        """
        if self.is_last:
            return
        (size,) = self._boundary.sizes(slot.sequences, slot.tokens)
        (template,) = self._boundary.tensors
        if output.shape != size or output.dtype != template.dtype:
            raise TeraPipeError(
                f"model: found an output of shape {tuple(output.shape)} and {output.dtype} for a "
                f"slice, allowed is {size} and {template.dtype}, which the next stage expects; "
                "change pipeline_dtype, or the model"
            )
        self._outputs.send([output], slot.micro_batch, slot.slice)

    def receive_output_grad(self) -> Tensor:
        """The gradient of the next slice's output."""
        (tensor,) = self._output_grads.receive()
        return tensor

    def send_input_grad(self, inputs: Tensor, slot: Slot) -> None:
        """Posts the gradient of a slice's input; zeros where nothing needed one."""
        grad = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
        self._input_grads.send([grad], slot.micro_batch, slot.slice)

    def drain(self, *, trains: bool) -> None:
        """Waits until all sends of a step are done."""
        if not self.is_last:
            self._outputs.drain()
        if trains and not self.is_first:
            self._input_grads.drain()


def boundary_of(config: Any, *, shares: int) -> Boundary:
    """What crosses between stages of a model.

    Args:
        config: megatron's.
        shares: ranks that share a slice's tokens, under sequence parallelism.
    """
    dtype = config.pipeline_dtype or config.params_dtype
    size = (1, 1, config.hidden_size)
    crossing = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
    return Boundary.of((crossing,), (_SEQUENCE_FIRST,), sequences=1, tokens=shares)


__all__ = ["Neighbours", "boundary_of"]
