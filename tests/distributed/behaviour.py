"""What ranks run in the tests of behaviour: each function compares sliced training with stock's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.schedule import ReduceGrads
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import tensor_parallel as megatron_tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import terapipe_ds
from terapipe_ds.models.gpt import gpt_pipeline
from terapipe_ds.runtime.deepspeed_seams import recomputes_on_a_stream
from tests.conftest import SEED

from . import cases, toy, workers
from .workers import batches, ds_config, endless, engine_of, initialize_distributed, keep_gradients

BLOCK = {"slices": [9, 30, 9], "timeout_s": 60}


def small_gpt(**kwargs: Any) -> Any:
    """A GPT on all ranks as stages, fp32."""
    config = TransformerConfig(
        num_layers=kwargs.pop("layers", 4),
        hidden_size=cases.HIDDEN,
        num_attention_heads=4,
        hidden_dropout=kwargs.pop("dropout", 0.0),
        attention_dropout=kwargs.pop("attention_dropout", 0.0),
        **kwargs.pop("config", {}),
    )
    if "topology" not in kwargs:
        kwargs["num_stages"] = torch.distributed.get_world_size()
    module = gpt_pipeline(
        config, vocab_size=cases.VOCAB, seq_length=cases.SEQ_LENGTH, seed=SEED, **kwargs
    )
    # An earlier model of this process has seeded megatron's states; gpt_pipeline keeps them.
    torch.manual_seed(SEED + module.stage_id)
    megatron_tensor_parallel.model_parallel_cuda_manual_seed(SEED + module.stage_id)
    return module


def both(micro_batches: int, *, build: Any = small_gpt, block: Any = BLOCK, **extra: Any) -> Any:
    """A stock engine and a sliced one over the same model."""
    return (
        engine_of(build(), micro_batches, **extra),
        engine_of(build(), micro_batches, block, **extra),
    )


def assert_same(found: Any, expected: Any, what: str, tolerance: float = 2e-6) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        gap = workers.difference(torch.as_tensor(one), torch.as_tensor(other))
        assert gap <= tolerance, f"{what} {index} differs by {gap:.2e}"


def assert_same_gradients(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    gap, name = workers.worst(found, expected)
    assert gap <= tolerance, f"gradient of {name} differs by {gap:.2e}"


# Evaluation


def evaluation() -> None:
    """Every form of ``eval_batch`` gives what stock gives, on every rank."""
    initialize_distributed()
    stock, sliced = both(3)
    for kwargs in (
        {},
        {"num_micro_batches": 5},
        {"reduce_output": None, "bcast_loss": False},
        {"return_logits": True},
        {"compute_loss": False, "bcast_loss": False},
        {"compute_loss": False, "bcast_loss": False, "reduce_output": None},
    ):
        stock.total_loss = None  # stock adds outputs to the loss of an earlier evaluation
        expected = stock.eval_batch(iter(batches(5)), **kwargs)
        found = sliced.eval_batch(iter(batches(5)), **kwargs)
        if kwargs.get("return_logits"):
            (expected, expected_logits), (found, logits) = expected, found
            assert (logits is None) == (expected_logits is None)
            if logits is not None:
                assert logits.shape == expected_logits.shape
                assert_same([logits], [expected_logits], "logits")
        if expected is None:
            assert found is None, f"eval_batch({kwargs}) gave {found} on {sliced.stage_id}"
            continue
        expected = expected if isinstance(expected, list) else [expected]
        found = found if isinstance(found, list) else [found]
        assert_same(found, expected, f"eval_batch({kwargs})")
    assert sliced._step is None, "evaluation left its context behind"


def evaluate_train_evaluate() -> float:
    """With a learning rate of 0, both evaluations are equal, and on all ranks."""
    initialize_distributed()
    engine = engine_of(small_gpt(), 2, BLOCK, lambda chosen: torch.optim.SGD(chosen, lr=0.0))
    data = endless(batches(2))
    before = engine.eval_batch(iter(batches(2, seed=1))).item()
    engine.train_batch(data)
    after = engine.eval_batch(iter(batches(2, seed=1))).item()
    assert before == after, f"{before} before training, {after} after it"
    return after


def fifty_evaluations() -> None:
    initialize_distributed()
    engine = engine_of(small_gpt(), 1, BLOCK)
    data = endless(batches(3))
    for _ in range(50):
        engine.eval_batch(data)


def additional_losses() -> None:
    """Weighted over slices as the loss is."""
    initialize_distributed()
    stages = torch.distributed.get_world_size()
    # Stock cannot send a constant table between stages.
    whole = None if stages == 1 else {"slices": 1}
    for block in (whole, {"slices": [5, 12, 7]}):
        module = toy.toy_pipeline(stages, additional=True, ties=stages > 1)
        engine = engine_of(module, 2, block)
        found = [engine.train_batch(iter(toy.toy_batches(2)))]
        found += engine.get_additional_losses().values()
        if block is whole:
            expected = found
    assert list(engine.get_additional_losses()) == ["doubled"]
    assert_same(found, expected, "loss")


# Shapes and data


def changing_lengths() -> None:
    """Grows, then shrinks; stock must be told, the sliced engine need not."""
    initialize_distributed()
    stock, sliced = both(2, block={"slices": 3})
    for length in (30, 48, 11, 48):
        stock.reset_activation_shape()
        losses = [
            engine.train_batch(iter(batches(2, length=length, seed=length)))
            for engine in (stock, sliced)
        ]
        assert_same(losses[1:], losses[:1], f"loss at {length} tokens,")


def mixed_lengths_in_one_step() -> None:
    """Micro-batches of one step may differ in length; the gradient is that of their mean."""
    initialize_distributed()
    data = [batches(1, length=length, seed=length)[0] for length in (20, 48, 33)]
    engine = engine_of(small_gpt(), 3, {"slices": 4})
    kept = keep_gradients(engine)
    engine.train_batch(iter(data))
    total: dict[str, Tensor] = {}
    for entry in data:
        alone = engine_of(small_gpt(), 1, {"slices": 1})
        gradients = keep_gradients(alone)
        alone.train_batch(iter([entry]))
        for name, gradient in gradients[0].items():
            total[name] = total.get(name, 0) + gradient / 3
    assert_same_gradients(kept[0], total)


def several_tensors_cross() -> None:
    """Integer tensors and a constant table between stages; labels meet their own outputs."""
    initialize_distributed()
    stages = torch.distributed.get_world_size()
    reference = engine_of(toy.toy_pipeline(stages), 3, {"slices": 1})
    expected = keep_gradients(reference)
    expected_loss = reference.train_batch(iter(toy.toy_batches(3)))
    for block in (
        {"slices": [5, 12, 7]},
        {"slices": 5, "schedule": "gpipe"},
        {"slices": [[1, [20, 4]], [1, [3, 3, 18]]]},
        {"slices": [1, 22, 1], "loss": "whole_sequence"},
    ):
        engine = engine_of(toy.toy_pipeline(stages), 3, block)
        kept = keep_gradients(engine)
        loss = engine.train_batch(iter(toy.toy_batches(3)))
        assert_same([loss], [expected_loss], f"loss with {block},")
        assert_same_gradients(kept[0], expected[0])


def torch_autocast() -> None:
    """DeepSpeed's ``torch_autocast``: as without slices, and not as without it.

    Stock on one stage; on two it cannot send the toy's constant table.
    """
    initialize_distributed()
    stages = torch.distributed.get_world_size()
    settings = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    found = []
    whole = None if stages == 1 else {"slices": 1}
    for block, extra in ((whole, settings), ({"slices": [5, 12, 7]}, settings), (whole, {})):
        engine = engine_of(toy.toy_pipeline(stages, ties=False), 2, block, **extra)
        engine.train_batch(iter(toy.toy_batches(2)))
        found.append({name: p.detach() for name, p in engine.module.named_parameters()})
    stock, sliced, exact = found
    assert_same_gradients(sliced, stock, tolerance=1e-3)
    gap, _ = workers.worst(exact, stock)
    assert gap > 1e-6, "autocast made no difference"


def tied_weights() -> dict[str, Tensor]:
    """After 5 steps, the copies of two tied layers."""
    initialize_distributed()
    engine = engine_of(toy.toy_pipeline(torch.distributed.get_world_size()), 2, {"slices": 4})
    data = endless(toy.toy_batches(4))
    for _ in range(5):
        engine.train_batch(data)
    return {
        name: parameter.detach()
        for name, parameter in engine.module.named_parameters()
        if name.startswith("tied_modules")
    }


def accumulation_is_a_mean() -> None:
    """The same data over 1 or 4 micro-batches, in 1 or 4 slices: the same gradient norm."""
    initialize_distributed()
    rows = batches(1, sequences=4)[0]
    parts = [
        tuple(tuple(tensor[row : row + 1] for tensor in group) for group in rows)
        for row in range(4)
    ]
    for _, (_, mask) in [rows, *parts]:
        mask.fill_(1.0)  # all tokens count, so that a mean of means is the mean
    norms = {}
    for micro_batches, slices in itertools.product((1, 4), (1, 4)):
        engine = engine_of(
            small_gpt(),
            micro_batches,
            {"slices": slices},
            train_micro_batch_size_per_gpu=4 // micro_batches,
        )
        kept = keep_gradients(engine)
        engine.train_batch(iter([rows] if micro_batches == 1 else parts))
        norms[micro_batches, slices] = math.sqrt(
            sum(gradient.double().pow(2).sum().item() for gradient in kept[0].values())
        )
    for key, norm in norms.items():
        total = torch.tensor(norm**2)
        torch.distributed.all_reduce(total)
        norms[key] = math.sqrt(total)
    reference = norms[1, 1]
    for key, norm in norms.items():
        assert abs(norm - reference) <= 1e-5 * reference, f"norms {norms}, {key} differs"


def clipped_steps(sliced: bool) -> dict[str, Tensor]:
    """By how much one clipped SGD step changes the parameters."""
    initialize_distributed()
    module = small_gpt()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    if sliced:
        optimizer = lambda chosen: torch.optim.SGD(chosen, lr=1000.0)  # noqa: E731
        engine = engine_of(module, 2, BLOCK, optimizer, gradient_clipping=0.01)
        engine.train_batch(iter(batches(2)))
    else:
        for inputs, labels in batches(2):
            (module.loss_fn(module(inputs), labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        torch.optim.SGD(module.parameters(), lr=1000.0).step()
    return {
        name: parameter.detach() - before[name] for name, parameter in module.named_parameters()
    }


# DeepSpeed's features


def recompute(use_reentrant: bool, dropout: float, attention_dropout: float) -> None:
    """DeepSpeed's activation checkpointing over every layer: gradients as without."""
    initialize_distributed()
    pipeline = {"activation_checkpoint_interval": 1, "use_reentrant": use_reentrant}
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    engine = engine_of(small_gpt(**rates), 2, BLOCK)
    expected = keep_gradients(engine)
    engine.train_batch(iter(batches(2)))
    engine = engine_of(small_gpt(**rates), 2, BLOCK, pipeline=pipeline)
    kept = keep_gradients(engine)
    engine.train_batch(iter(batches(2)))
    assert engine.module.activation_checkpoint_interval == 1
    assert kept[0].keys() == expected[0].keys()
    assert_same_gradients(kept[0], expected[0])


def selective_recompute(module: str) -> None:
    """megatron's own recomputation of parts of a layer: gradients as without."""
    initialize_distributed()
    found = []
    for recompute in ({}, {"recompute_granularity": "selective", "recompute_modules": [module]}):
        # megatron-core 0.16.1 recurses without end where an MLP with biases is recomputed.
        config = {"add_bias_linear": False, **recompute}
        engine = engine_of(small_gpt(config=config, dropout=0.1), 2, BLOCK)
        kept = keep_gradients(engine)
        engine.train_batch(iter(batches(2)))
        found.append(kept[0])
    assert_same_gradients(found[1], found[0])


def checkpoints(folder: str) -> None:
    """Saved sliced, loaded stock, and the other way: the next losses are those of no break."""
    initialize_distributed()

    def make(block: Any) -> Any:
        return engine_of(
            small_gpt(), 2, block, lambda chosen: torch.optim.AdamW(chosen, lr=0.01, eps=1e-3)
        )

    for saved_with, loaded_with in ((BLOCK, None), (None, BLOCK), (BLOCK, BLOCK)):
        data = batches(10)
        path = f"{folder}/{saved_with is None}-{loaded_with is None}"
        engine = make(saved_with)
        for step in range(2):
            engine.train_batch(iter(data[2 * step :]))
        engine.save_checkpoint(path)
        expected = [engine.train_batch(iter(data[2 * step :])) for step in (2, 3, 4)]
        resumed = make(loaded_with)
        loaded, _ = resumed.load_checkpoint(path)
        assert loaded is not None, "the checkpoint was not found"
        assert resumed.global_steps == 2
        found = [resumed.train_batch(iter(data[2 * step :])) for step in (2, 3, 4)]
        assert_same(found, expected, "loss after resuming", tolerance=1e-5)


def monitors_and_timers(folder: str) -> None:
    """CSV monitor and wall_clock_breakdown do not disturb, and get what stock gives."""
    initialize_distributed()
    engine = engine_of(
        small_gpt(),
        2,
        BLOCK,
        wall_clock_breakdown=True,
        steps_per_print=1,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"},
    )
    for _ in range(2):
        engine.train_batch(iter(batches(2)))
    engine.eval_batch(iter(batches(2)))


def batch_size_changes() -> None:
    """``set_train_batch_size`` between steps."""
    initialize_distributed()
    stock, sliced = both(2)
    for micro_batches in (2, 3, 1):
        losses = []
        for engine in (stock, sliced):
            engine.set_train_batch_size(micro_batches * cases.SEQUENCES)
            losses.append(engine.train_batch(iter(batches(3))))
        assert_same(losses[1:], losses[:1], f"loss with {micro_batches} micro-batches,")


def renamed_class(name: str) -> None:
    """DeepSpeed keys behaviour on some class names; the sliced engine on none."""
    initialize_distributed()
    runs = []
    for renamed in (False, True):
        module = small_gpt()
        if renamed:
            module.__class__ = type(name, (type(module),), {})
        engine = engine_of(module, 1, BLOCK)
        kept = keep_gradients(engine)
        runs.append((kept, [engine.train_batch(iter(batches(1))) for _ in range(2)]))
    (expected, losses), (found, found_losses) = runs
    assert_same(found_losses, losses, "loss")
    for step in range(2):
        assert_same_gradients(found[step], expected[step])


def layers_over_stages(layers: int, zero_stage: int = 0) -> list[int]:
    """As many pipeline layers on each stage as come out; embedding-only and norm-only stages."""
    initialize_distributed()
    module = small_gpt(layers=layers, partition_method="uniform")
    engine = engine_of(
        module,
        2,
        BLOCK,
        zero_optimization={"stage": zero_stage},
        zero_allow_untested_optimizer=True,
    )
    losses = [engine.train_batch(iter(batches(2))).item() for _ in range(3)]
    assert losses[2] < losses[0], f"does not learn: {losses}"
    return [stop - start for start, stop in itertools.pairwise(module.parts)]


def bf16_zero1() -> None:
    """bf16 with ZeRO-1 follows fp32 within bf16's error."""
    initialize_distributed()

    def losses(block: Any, **extra: Any) -> list[float]:
        # SGD, whose step shows the scale of a gradient.
        optimizer = lambda chosen: torch.optim.SGD(chosen, lr=0.2)  # noqa: E731
        engine = engine_of(small_gpt(), 2, block, optimizer, **extra)
        return [engine.train_batch(iter(batches(2))).item() for _ in range(3)]

    bf16 = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    exact, stock, found = losses(None), losses(None, **bf16), losses(BLOCK, **bf16)
    for step in range(3):
        assert abs(found[step] - exact[step]) <= 0.02 * exact[step], (found, exact)
        assert abs(found[step] - stock[step]) <= 0.004 * stock[step], (found, stock)
    assert found[2] < 0.99 * found[0], found


FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def fp16() -> None:
    """fp16 with dynamic loss scaling follows fp32 within fp16's error, as stock DeepSpeed does."""
    initialize_distributed()

    def losses(block: Any, **extra: Any) -> list[float]:
        optimizer = lambda chosen: torch.optim.SGD(chosen, lr=0.2)  # noqa: E731
        engine = engine_of(small_gpt(), 2, block, optimizer, **extra)
        return [engine.train_batch(iter(batches(2))).item() for _ in range(3)]

    exact, found = losses(None), losses(BLOCK, **FP16)
    split = losses({**BLOCK, "schedule": "zb-h1"}, **FP16)
    for step in range(3):
        assert abs(found[step] - exact[step]) <= 0.003 * exact[step], (found, exact)
        assert abs(split[step] - found[step]) <= 0.001 * found[step], (split, found)
    assert found[2] < 0.99 * found[0], found


def overflow_on_one_stage() -> None:
    """An infinite gradient on the first stage: every stage skips the step and halves the scale."""
    initialize_distributed()
    engine = engine_of(small_gpt(), 2, BLOCK, **FP16)
    reduce = type(engine)._INSTRUCTION_MAP[ReduceGrads]
    plant = True

    def reduce_with_infinity(self: Any) -> None:
        if plant and self.is_first_stage():
            next(self.module.parameters()).grad.view(-1)[0] = math.inf
        reduce(self)

    engine._INSTRUCTION_MAP = {
        **type(engine)._INSTRUCTION_MAP,
        ReduceGrads: reduce_with_infinity,
    }
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    scale = engine.optimizer.loss_scale
    engine.train_batch(iter(batches(2)))
    assert engine.skipped_steps == 1
    assert engine.optimizer.loss_scale == scale / 2
    assert_same(list(engine.module.parameters()), before, "parameter", 0.0)
    plant = False
    engine.train_batch(iter(batches(2)))
    assert engine.skipped_steps == 1
    gaps = [
        workers.difference(parameter.detach(), old)
        for parameter, old in zip(engine.module.parameters(), before, strict=True)
    ]
    assert max(gaps) > 0


def data_parallel() -> None:
    """2 stages, 2 replicas: gradients are those of the mean over both replicas' data."""
    initialize_distributed()
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    replica = topology.get_coord(torch.distributed.get_rank()).data
    data = [batches(2, seed=1), batches(2, seed=2)]
    for block in (None, BLOCK):
        engine = engine_of(small_gpt(topology=topology), 2, block)
        kept = keep_gradients(engine)
        loss = engine.train_batch(iter(data[replica]))
        if block is None:
            expected, expected_loss = kept[0], loss
    assert_same([loss], [expected_loss], "loss")
    assert_same_gradients(kept[0], expected)


def tensor_parallel(replicas: int, config: dict[str, Any], build: dict[str, Any]) -> None:
    """2 stages, each over 2 ranks, in 1 or 2 replicas: gradients are those of stock DeepSpeed."""
    initialize_distributed()
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=replicas)
    replica = topology.get_coord(torch.distributed.get_rank()).data
    config = {"tensor_model_parallel_size": 2, **config}
    sliced = {**BLOCK, "slices": [10, 30, 8]}
    for block in (None, sliced, {**sliced, "schedule": "zb-h1"}):
        # Stock shares what crosses between the tensor-parallel ranks, as if all had the same; under
        # sequence parallelism each has its own tokens.
        alone = {"pipe_partitioned": False, "grad_partitioned": False}
        module = small_gpt(topology=topology, config=dict(config), **build)
        engine = engine_of(module, 2, block, pipeline=alone)
        kept = keep_gradients(engine)
        loss = engine.train_batch(iter(batches(2, seed=replica)))
        if block is None:
            expected, expected_loss = kept[0], loss
            continue
        assert_same([loss], [expected_loss], "loss")
        assert_same_gradients(kept[0], expected)


def tensor_parallel_is_one_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Gradients that all ranks keep whole: equal on both ranks, and those of a single rank."""
    initialize_distributed()
    ranks = torch.distributed.get_world_size()
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=ranks, num_dp=1)
    if ranks == 1:
        config = {**config, "sequence_parallel": False}
    # Initialised on the CPU, weights do not depend on the number of ranks.
    whole = {"tensor_model_parallel_size": ranks, "use_cpu_initialization": True}
    module = small_gpt(topology=topology, config={**whole, **config})
    engine = engine_of(module, 2, {"slices": [10, 30, 8]})
    kept = keep_gradients(engine)
    engine.train_batch(iter(batches(2)))
    return {name: grad for name, grad in kept[0].items() if grad.dim() == 1}


def sliding_window(recompute: bool) -> None:
    """Windows of 10 tokens on all layers but every second: gradients are those of stock DeepSpeed.

    And they are not those of attention to all tokens.
    """
    initialize_distributed()
    interval = {"activation_checkpoint_interval": 1 if recompute else 0}
    window = {"window_size": (10, 0), "window_attn_skip_freq": 2}
    found = []
    for block, config in ((None, window), (BLOCK, window), (BLOCK, {})):
        engine = engine_of(small_gpt(config=config), 2, block, pipeline=interval)
        kept = keep_gradients(engine)
        engine.train_batch(iter(batches(2)))
        found.append(kept[0])
    expected, sliced, everything = found
    assert_same_gradients(sliced, expected)
    gap, _ = workers.worst(everything, expected)
    assert gap > 1e-3, "the window made no difference"


def dropout_repeats() -> None:
    """Two runs with one seed are identical, gradients finite, with both kinds of dropout."""
    initialize_distributed()
    runs = []
    for _ in range(2):
        engine = engine_of(small_gpt(dropout=0.1, attention_dropout=0.1), 2, BLOCK)
        kept = keep_gradients(engine)
        engine.train_batch(iter(batches(2)))
        runs.append(kept[0])
    for name, gradient in runs[0].items():
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(gradient, runs[1][name]), f"{name} differs between two runs"


def frozen(what: str) -> None:
    """Frozen parameters change no other gradient, with recomputation of any kind."""
    initialize_distributed()
    kinds = (
        {},
        {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
        {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    )
    if recomputes_on_a_stream():
        kinds = kinds[:2]
    expected = None
    for extra in kinds:
        for block in ({"slices": 1}, BLOCK):
            module = small_gpt(tied_head=False)
            for name, parameter in module.named_parameters():
                embedding = name.startswith("0.")
                if embedding or (what == "first stage" and module.stage_id == 0):
                    parameter.requires_grad_(False)
            engine = engine_of(module, 2, block, **extra)
            kept = keep_gradients(engine)
            engine.train_batch(iter(batches(2)))
            expected = expected or kept[0]
            assert kept[0].keys() == expected.keys()
            if expected:
                assert_same_gradients(kept[0], expected)
    if what == "embedding" or engine.stage_id > 0:
        assert all(gradient.abs().max() > 0 for gradient in expected.values())


def reused_buffers() -> None:
    """An iterator may fill the same tensors for each micro-batch, and finds them unchanged."""
    initialize_distributed()

    def reusing() -> Iterator[Any]:
        made = batches(2)
        inputs, labels = (tuple(t.contiguous() for t in part) for part in batches(1)[0])
        for new_inputs, new_labels in made:
            for old, new in zip((*inputs, *labels), (*new_inputs, *new_labels), strict=True):
                old.copy_(new)
            yield inputs, labels

    losses = [
        engine_of(small_gpt(), 2, BLOCK).train_batch(data) for data in (reusing(), iter(batches(2)))
    ]
    assert_same(losses[:1], losses[1:], "loss")


def goes_on_after_an_error() -> None:
    """A script may catch what all ranks raise together, and train on."""
    initialize_distributed()
    topology = None
    if torch.distributed.get_world_size() == 4:
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    build = {} if topology is None else {"topology": topology}
    engine = engine_of(small_gpt(**build), 2, BLOCK)
    untroubled = engine_of(small_gpt(**build), 2, BLOCK)
    for step in range(4):
        for data, error in (
            (batches(1), terapipe_ds.DataIteratorEnded),
            (batches(2, length=40), terapipe_ds.ConfigError),
        ):
            for run in (engine.train_batch, engine.eval_batch):
                try:
                    run(iter(data))
                except error:
                    continue
                raise AssertionError(f"{error.__name__} was not raised")
        losses = [e.train_batch(iter(batches(2, seed=step))) for e in (engine, untroubled)]
        assert_same(losses[:1], losses[1:], f"loss of step {step},")


# Memory


class HeldBytes:
    """Bytes held for backward: distinct storages that autograd saved, and the KV context's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.parameters = {
            parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()
        }
        self.saved: dict[int, Tensor] = {}
        self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        return _Saved(self, tensor)

    def unpack(self, saved: Any) -> Tensor:
        return saved.tensor

    def measure(self) -> None:
        tensors = list(self.saved.values())
        for group in self.engine._step.groups:
            for layer in group.context._layers.values():
                tensors += [layer.key, layer.value]
                tensors += [gradient for gradient in layer._gradients if gradient is not None]
            tensors += [tensor for outputs in group.outputs.values() for tensor in outputs]
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in tensors)
        }
        held = sum(size for pointer, size in storages.items() if pointer not in self.parameters)
        self.peak = max(self.peak, held)


class _Saved:
    def __init__(self, held: HeldBytes, tensor: Tensor) -> None:
        self.held, self.tensor = held, tensor.detach()
        held.saved[id(self)] = self.tensor

    def __del__(self) -> None:
        self.held.saved.pop(id(self), None)


def peak_held(schedule: str) -> int:
    """The most bytes held for backward on this rank in a step of 4 micro-batches of 8 slices."""
    initialize_distributed()
    engine = engine_of(small_gpt(), 4, {"slices": 8, "schedule": schedule})
    held = HeldBytes(engine)

    def measured(method: Any) -> Any:
        def run(self: Any, **kwargs: Any) -> None:
            method(self, **kwargs)
            held.measure()

        return run

    engine._INSTRUCTION_MAP = {
        kind: measured(method) for kind, method in type(engine)._INSTRUCTION_MAP.items()
    }
    with torch.autograd.graph.saved_tensors_hooks(held.pack, held.unpack):
        engine.train_batch(iter(batches(4)))
    return held.peak


def stock_is_stock() -> str:
    """Without the block, or with it switched off, the engine is DeepSpeed's own."""
    initialize_distributed()
    kinds = [
        type(terapipe_ds.initialize(model=small_gpt(), config=config)[0]).__name__
        for config in (
            {**ds_config(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
            {
                **ds_config(1, {"enabled": False, "slices": "auto"}),
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            },
        )
    ]
    assert deepspeed.PipelineEngine.__name__ == "PipelineEngine"
    return ", ".join(kinds)
