"""Real text that every Python has, as megatron-core's indexed dataset, bytes as tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.utils import RepeatingLoader
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

from terapipe_ds.models.gpt import batch

END_OF_DOCUMENT, PADDING = 256, 257
VOCAB_SIZE = 258
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def write_indexed_dataset(prefix: Path) -> None:
    """Writes the standard library's sources and docs as one document a file.

    Args:
        prefix: of the ``.bin`` and ``.idx`` files; existing ones are kept.
    """
    if prefix.with_suffix(".idx").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    builder = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=numpy.uint16)
    # The reference documentation is among them, in pydoc_data/topics.py.
    for path in sorted(library.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(library).parts):
            text = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8)
            tokens = numpy.append(text.astype(numpy.int32), numpy.int32(END_OF_DOCUMENT))
            builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    temporary = prefix.with_suffix(".idx.tmp")
    builder.finalize(str(temporary))
    temporary.replace(prefix.with_suffix(".idx"))


def datasets(prefix: Path, *, seq_length: int, samples: int, seed: int) -> tuple[Any, Any]:
    """megatron-core's training and validation sets over the written files.

    Args:
        prefix: as given to :func:`write_indexed_dataset`.
        seq_length: tokens of a sample.
        samples: how many training samples will be drawn.
        seed: of the shuffle.
    """
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"},
        vocab_size=VOCAB_SIZE,
        _eos_id=END_OF_DOCUMENT,
        _pad_id=PADDING,
    )
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([str(prefix)], None),
        split="95,5,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(prefix.parent / "cache"),
    )
    sizes = [samples, 16, 0]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    training, validation, _ = builder.build()
    return training, validation


def batches(dataset: Any, *, sequences: int) -> Iterator[Any]:
    """Micro-batches of the model's form, from the first sample on, without end."""
    loader = torch.utils.data.DataLoader(dataset, batch_size=sequences, drop_last=True)
    for sample in RepeatingLoader(loader):
        yield batch(sample["tokens"], sample["labels"], sample["loss_mask"])
