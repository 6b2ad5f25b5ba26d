"""Trains as Megatron-LM's scripts do: arguments, a stage, and megatron's own schedule."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.integrations import megatron_lm
from tests.integrations.megatron_lm import Setting


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-micro-batches", type=int, default=3)
    parser.add_argument("--train-iters", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args(argv)


def pretrain(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates; returns what the last stage prints."""
    megatron_lm.prepare_stock()
    setting = Setting(
        pipe=args.pipeline_model_parallel_size, micro_batches=args.num_micro_batches, ddp={}
    )
    megatron_lm.initialize(setting)
    model = megatron_lm.model_of(setting)
    losses = [train_step(setting, model, args.lr) for _ in range(args.train_iters)]
    model.eval()
    with torch.no_grad():
        evaluation = mean_loss(setting, model, forward_only=True)
    schedule = get_forward_backward_func()
    return {
        "losses": losses,
        "evaluation": evaluation,
        "schedule": getattr(schedule, "__name__", type(schedule).__name__),
        "has deepspeed": "deepspeed" in sys.modules,
    }


def train_step(setting: Setting, model: Any, rate: float) -> float:
    model.zero_grad_buffer()
    loss = mean_loss(setting, model, forward_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.main_grad, alpha=rate)
    return loss


def mean_loss(setting: Setting, model: Any, *, forward_only: bool) -> float:
    """Over the micro-batches of a step; 0 on other stages than the last."""
    reported = get_forward_backward_func()(
        forward_step_func=partial(megatron_lm.forward_step, setting),
        data_iterator=megatron_lm.batches(setting),
        model=[model],
        num_microbatches=setting.micro_batches,
        seq_length=megatron_lm.LENGTH,
        micro_batch_size=megatron_lm.SEQUENCES,
        decoder_seq_length=None,
        forward_only=forward_only,
    )
    return sum(float(each["lm loss"]) for each in reported) / setting.micro_batches


if __name__ == "__main__":
    results = pretrain(parse())
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(f"results: {json.dumps(results)}", flush=True)
