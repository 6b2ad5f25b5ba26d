"""What ranks run in the tests of sequences that grow, and of prompts longer than those trained."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from torch import Tensor

import terapipe_ds
from terapipe_ds.models.gpt import batch

from . import cases
from .behaviour import assert_same, small_gpt
from .workers import batches, ds_config, engine_of, initialize_distributed, mean_loss

SEQLEN = {
    "min_difficulty": 8,
    "max_difficulty": cases.SEQ_LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
}
"""DeepSpeed's schedule of lengths: 16, 24, 32 and from then on 48 tokens."""

LENGTHS = [16, 24, 32, 48, 48]


def shortened(data: Any, length: int) -> Any:
    """A micro-batch's first tokens, as scripts of a curriculum cut them."""
    return tuple(tuple(tensor[:, :length] for tensor in part) for part in data)


# Curriculum


def curriculum() -> list[int]:
    """Lengths grow by DeepSpeed's scheduler: losses are stock's, without a profile or a pause."""
    initialize_distributed()
    engines = [
        engine_of(small_gpt(), 2, block)
        for block in (None, {"slices": 3}, {"slices": 3, "schedule": "zb-h1"})
    ]
    scheduler = CurriculumScheduler(SEQLEN)
    lengths = []
    for step in range(1, 6):
        length = scheduler.update_difficulty(step)
        data = [shortened(entry, length) for entry in batches(2, seed=step)]
        losses = []
        for engine in engines:
            if lengths and lengths[-1] != length:
                engine.reset_activation_shape()
            losses.append(engine.train_batch(iter(data)))
        lengths.append(length)
        assert_same(losses[1:], 2 * losses[:1], f"loss at {length} tokens,")
    return lengths


class Sequences(torch.utils.data.Dataset[Tensor]):
    """Numbered random sequences."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, cases.VOCAB, (cases.SEQ_LENGTH + 1,), generator=generator)


def collated(rows: list[Tensor]) -> Any:
    tokens = torch.stack(rows)
    return batch(tokens[:, :-1], tokens[:, 1:])


def sampled(folder: str, block: Any) -> Any:
    """An engine that reads ``Sequences`` by DeepSpeed's curriculum sampler; two micro-batches."""
    metric = {
        **SEQLEN,
        "index_to_sample_path": "none",
        "index_to_metric_path": "none",
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
    }
    sampling = {
        "enabled": True,
        "num_workers": 0,
        "curriculum_learning": {
            "enabled": True,
            "data_cluster_path": folder,
            "curriculum_metrics": {"seqlen": metric},
        },
    }
    module = small_gpt()
    return terapipe_ds.initialize(
        model=module,
        config=ds_config(2, block, data_efficiency={"enabled": True, "data_sampling": sampling}),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.05),
        training_data=Sequences(),
        collate_fn=collated,
    )[0]


def curriculum_of_the_sampler(folder: str) -> list[int]:
    """DeepSpeed's data sampler on one stage: losses are stock's."""
    initialize_distributed()
    lengths = []
    losses = []
    for name, block in (("stock", None), ("sliced", {"slices": 3})):
        engine = sampled(f"{folder}/{name}", block)

        def cut(data: Any, state: dict[str, Any]) -> Any:
            lengths.append(state["current_difficulties"]["seqlen"])
            return shortened(data, lengths[-1])

        # DeepSpeed 0.19.8's set_data_post_process_func reaches the pipeline's outer loader alone.
        engine.training_dataloader.loader.post_process_func = cut
        losses.append([engine.train_batch() for _ in LENGTHS])
    assert_same(losses[1], losses[0], "loss")
    return lengths[: 2 * len(LENGTHS) : 2]


def refused_curricula(folder: str) -> dict[str, str]:
    """What each rank is told, of curricula that cannot work."""
    initialize_distributed()
    told = {}

    def lengths() -> None:
        engine = engine_of(small_gpt(), 2, {"slices": [5, 11], "timeout_s": 20})
        for length in LENGTHS:
            engine.train_batch(iter([shortened(entry, length) for entry in batches(2)]))

    def legacy() -> None:
        engine_of(small_gpt(), 2, {"slices": 3}, curriculum_learning={"enabled": True, **SEQLEN})

    def sampler() -> None:
        sampled(folder, {"slices": 3})

    for run in (lengths, legacy, sampler):
        try:
            run()
        except (terapipe_ds.ConfigError, DeepSpeedConfigError) as error:
            told[run.__name__] = str(error)
    return told


# Prompts


LAYERS = 4
PROMPT = 200


def long_prompts() -> None:
    """Prompts longer than what is trained: logits are stock's, one context at a time."""
    initialize_distributed()
    # DeepSpeed's reduction of gradients knows no float64 on CPU, though it would run as it is.
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float64]
    rotary = {
        "position_embedding_type": "rope",
        "config": {"params_dtype": torch.float64, "num_query_groups": 2},
        "loss_fn": mean_loss,  # megatron's is fp32 inside
        "loss_is_token_mean": True,
    }
    prompts = batches(3, length=PROMPT, seed=1)
    groups = {"slices": [[1, [150, 50]], [1, [30, 90, 80]]]}
    for block, trained, sequences in ((groups, False, 1), ({"slices": 7}, True, cases.SEQUENCES)):
        stock, sliced = (engine_of(small_gpt(**rotary), 2, chosen) for chosen in (None, block))
        if trained:
            for engine in (stock, sliced):
                engine.communication_data_type = torch.float64
                engine.train_batch(iter(batches(2)))
        held = HeldContexts(sliced)
        for kwargs in ({"compute_loss": False, "bcast_loss": False}, {}):
            stock.reset_activation_shape()
            stock.total_loss = None  # stock adds outputs to the loss of an earlier evaluation
            kwargs = {**kwargs, "return_logits": True, "num_micro_batches": 3}
            _, expected = stock.eval_batch(iter(prompts), **kwargs)
            _, logits = sliced.eval_batch(iter(prompts), **kwargs)
            assert (logits is None) == (not sliced.is_last_stage())
            if logits is not None:
                assert logits.shape == (PROMPT, cases.SEQUENCES, cases.VOCAB)
                assert_same([logits], [expected], "logits", 1e-12)
        assert sliced._step is None, "evaluation left its context behind"
        assert held.contexts == 1, f"{held.contexts} contexts at a time"
        # K and V of this stage's layers, for one group's prompts, in fp64, on half of the heads.
        layers = LAYERS // sliced.num_stages
        expected_bytes = layers * 2 * PROMPT * sequences * (cases.HIDDEN // 2) * 8
        assert held.bytes == expected_bytes, f"{held.bytes} bytes held, not {expected_bytes}"


class HeldContexts:
    """Watches, after every instruction of an engine, how many contexts its step holds."""

    def __init__(self, engine: Any) -> None:
        self.contexts = 0
        self.bytes = 0

        def watched(method: Any) -> Any:
            def run(engine: Any, **kwargs: Any) -> None:
                method(engine, **kwargs)
                self._look(engine._step.groups)

            return run

        engine._INSTRUCTION_MAP = {
            kind: watched(method) for kind, method in type(engine)._INSTRUCTION_MAP.items()
        }

    def _look(self, groups: list[Any]) -> None:
        layers = [group.context.layers() for group in groups]
        self.contexts = max(self.contexts, sum(bool(entry) for entry in layers))
        buffers = [buffer for entry in layers for kv in entry for buffer in (kv.key, kv.value)]
        self.bytes = max(self.bytes, sum(buffer.untyped_storage().nbytes() for buffer in buffers))
