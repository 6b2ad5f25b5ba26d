"""Trains the stand-in's language model: start it with DeepSpeed's launcher."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch

if __name__ == "__main__":
    # Found beside the script, as such scripts find their packages.
    from legacy import set_args
    from legacy.model import LanguageModelPipe, get_batch_pipe
else:
    from .legacy import set_args
    from .legacy.model import LanguageModelPipe, get_batch_pipe


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=48)
    parser.add_argument("--padded-vocab-size", type=int, default=64)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--masked-softmax-fusion", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("selective", "full"))
    parser.add_argument("--reset-attention-mask", action="store_true")
    parser.add_argument("--train-iters", type=int, default=3)
    parser.add_argument("--save")
    parser.add_argument("--load")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args(argv)


def data(seed: int, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        size = (2, args.seq_length + 1)
        yield {"text": torch.randint(0, args.padded_vocab_size, size, generator=draw)}


def set_up(args: argparse.Namespace) -> Any:
    """The engine."""
    set_args(args)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    model = LanguageModelPipe(torch.distributed.get_world_size())
    length = args.seq_length
    args.attn_mask = torch.ones(1, 1, length, length).tril() < 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = json.loads(Path(args.deepspeed_config).read_text())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert isinstance(engine, deepspeed.PipelineEngine)
    engine.set_batch_fn(get_batch_pipe)
    if args.load:
        engine.load_checkpoint(args.load)
    return engine


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates, saves; returns what it prints."""
    engine = set_up(args)
    batches = data(1, args)
    for _ in range(engine.global_steps * engine.micro_batches):
        next(batches)
    losses = [engine.train_batch(batches).item() for _ in range(args.train_iters)]
    evaluation = engine.eval_batch(data(2, args)).item()
    if args.save:
        engine.save_checkpoint(args.save)
    return {"engine": type(engine).__name__, "losses": losses, "evaluation": evaluation}


def main() -> None:
    results = train(parse())
    if torch.distributed.get_rank() == 0:
        print(f"results: {json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main()
