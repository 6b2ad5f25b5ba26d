"""Two ways to split a backward, against the fused one: what does each cost?

    python benchmarks/split_backward.py

- *at the layers*: linear layers leave their weights' gradients as pieces of work
  (``terapipe_ds.runtime.weight_grads``, what ``zb-h1`` uses);
- *in the graph*: autograd's graph is cut as ``torch.distributed.pipelining`` does it for its
  zero-bubble schedules (``stage_backward_input`` and ``stage_backward_weight``).

One stage on one core: 4 layers of width 512 (megatron-core's layers, and the same shapes as plain
``torch.nn.Linear``), one slice of 256 tokens. Medians over interleaved runs, in ms.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import statistics
import time
from collections.abc import Callable

import deepspeed
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from terapipe_ds.models.gpt import gpt_pipeline, split_backward
from terapipe_ds.runtime.attention import causal_attention
from terapipe_ds.runtime.weight_grads import Work, put_off, split_linear_layers

HIDDEN, HEADS, LAYERS, TOKENS = 512, 8, 4, 256
Times = tuple[float, float]
"""(input part, weight part) in ms."""


class Block(nn.Module):
    """A transformer layer of plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[l, b, h]`` to the same."""
        parts = self.qkv(self.norms[0](hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, HIDDEN // HEADS)) for part in parts)
        hidden = hidden + self.out(causal_attention(self, query, key, value).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31, help="timed runs of each")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for name, stage in (("megatron-core", _megatron()), ("torch.nn.Linear", _plain())):
        _report(name, stage, args.repeats)


def _plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def _megatron() -> nn.Module:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **where)
    deepspeed.init_distributed("gloo", verbose=False)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    module = gpt_pipeline(config, vocab_size=64, seq_length=TOKENS, num_stages=1)
    return nn.Sequential(*module.forward_funcs[1 : LAYERS + 1])


def _report(name: str, stage: nn.Module, repeats: int) -> None:
    split = _copy(stage)
    if name == "megatron-core":
        split_backward(split)
    else:
        split_linear_layers(split)
    ways: dict[str, tuple[nn.Module, Callable[[nn.Module], Times]]] = {
        "fused": (stage, _fused),
        "at the layers": (split, _at_the_layers),
        "in the graph": (stage, _in_the_graph),
    }
    found: dict[str, list[Times]] = {way: [] for way in ways}
    gradients = {}
    for repeat in range(1 + repeats):
        for way, (module, run) in ways.items():
            times = run(module)
            if repeat:
                found[way].append(times)
            else:
                gradients[way] = {n: p.grad.clone() for n, p in module.named_parameters()}
                module.zero_grad()
    fused = statistics.median(sum(times) for times in found["fused"])
    print(f"\n{name}: backward of {TOKENS} tokens, ms")
    print(f"{'':16}{'input':>8}{'weights':>9}{'both':>8}{'over fused':>12}{'largest gap':>13}")
    for way, timed in found.items():
        inputs, weights = (statistics.median(part) for part in zip(*timed, strict=True))
        both = statistics.median(sum(times) for times in timed)
        gap = max(
            ((gradients[way][n] - g).abs().max() / g.abs().max()).item()
            for n, g in gradients["fused"].items()
        )
        over = both / fused - 1
        print(f"{way:16}{inputs:>8.1f}{weights:>9.1f}{both:>8.1f}{over:>+12.1%}{gap:>13.1e}")


def _copy(stage: nn.Module) -> nn.Module:
    if isinstance(stage[0], Block):
        return copy.deepcopy(stage)
    return _again(stage)


def _again(stage: nn.Module) -> nn.Module:
    """megatron's layers hold process groups, which cannot be copied: built again, same seed."""
    config = stage[0].layer.config
    module = gpt_pipeline(config, vocab_size=64, seq_length=TOKENS, num_stages=1)
    return nn.Sequential(*module.forward_funcs[1 : LAYERS + 1])


def _forward(stage: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
    output = stage(hidden)
    return hidden, output, torch.ones_like(output)


def _fused(stage: nn.Module) -> Times:
    _, output, grad = _forward(stage)
    start = time.perf_counter()
    output.backward(grad)
    return (time.perf_counter() - start) * 1e3, 0.0


def _at_the_layers(stage: nn.Module) -> Times:
    _, output, grad = _forward(stage)
    owed: list[Work] = []
    start = time.perf_counter()
    with put_off(owed):
        output.backward(grad)
    middle = time.perf_counter()
    for work in owed:
        work()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def _in_the_graph(stage: nn.Module) -> Times:
    hidden, output, grad = _forward(stage)
    start = time.perf_counter()
    _, groups = stage_backward_input([output], [grad], [hidden], iter(stage.parameters()))
    middle = time.perf_counter()
    stage_backward_weight(iter(stage.parameters()), groups)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


if __name__ == "__main__":
    main()
