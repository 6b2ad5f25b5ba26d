"""Runs Megatron-DeepSpeed's own ``pretrain_gpt.py``, as it is in a checkout, on CPU ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.distributed.ranks import free_port

ROOT = Path(__file__).parents[2]
NEEDS = ("transformers", "pybind11", "six", "regex")

# What the checkout imports, and DeepSpeed 0.19.8 or a machine without GPUs lacks; not used.
SITE = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

def stand_in(name, **content):
    module = sys.modules[name] = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    vars(module).update(content)

for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
    stand_in(name, VisionDataset=object)
stand_in("deepspeed.compression.compress", init_compression=None, redundancy_clean=None)
"""

MAKE_DATA = """
import sys
import numpy, torch
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder

builder = MMapIndexedDatasetBuilder(sys.argv[1] + ".bin", dtype=numpy.uint16)
draw = torch.Generator().manual_seed(0)
for _ in range(64):
    builder.add_item(torch.randint(0, 999, (300,), generator=draw))
    builder.end_document()
builder.finalize(sys.argv[1] + ".idx")
"""

ARGUMENTS = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 1 --train-iters 4
    --lr 3e-3 --min-lr 3e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0
    --attention-dropout 0 --hidden-dropout 0 --seed 1234
    --log-interval 1 --eval-interval 2 --eval-iters 1 --save-interval 2
    --tokenizer-type NullTokenizer --vocab-size 1000 --data-impl mmap --split 80,20,0
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-async-tensor-model-parallel-allreduce
    --distributed-backend gloo --num-workers 0 --deepspeed
""")


class Layout(NamedTuple):
    """Ranks of each kind, and the precision."""

    pipeline: int
    tensor: int = 1
    data: int = 1
    bf16_zero1: bool = False


class Result(NamedTuple):
    """What a run printed: by iteration the loss, and the losses of evaluations in order."""

    code: int
    losses: dict[int, float]
    evaluations: list[tuple[int, float]]
    output: str


class Checkout:
    """A checkout, and a folder for what its runs need and write."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout, self._folder = checkout, folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self._python("-c", MAKE_DATA, str(folder / "data"), paths=[checkout])

    def run(
        self,
        name: str,
        layout: Layout,
        *options: str,
        block: dict[str, Any] | None = None,
        load: str | None = None,
    ) -> Result:
        """Trains, stock without a block and sliced with one.

        Args:
            name: of the run; its checkpoints are kept under it.
            layout: the ranks.
            options: more of the script's options.
            block: the ``"terapipe"`` block.
            load: the run from whose checkpoint of iteration 2 this one goes on.
        """
        folder = self._folder / name
        folder.mkdir()
        sequences = 2 * layout.data
        config = {
            "train_batch_size": sequences,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(layout.bf16_zero1)},
            "bf16": {"enabled": layout.bf16_zero1},
            **({} if block is None else {"terapipe": block}),
        }
        (folder / "ds.json").write_text(json.dumps(config))
        arguments = [
            *ARGUMENTS,
            *("--pipeline-model-parallel-size", str(layout.pipeline)),
            *("--tensor-model-parallel-size", str(layout.tensor)),
            *("--global-batch-size", str(sequences)),
            *("--zero-stage", str(int(layout.bf16_zero1))),
            *("--deepspeed_config", str(folder / "ds.json")),
            *("--data-path", str(self._folder / "data")),
            *("--save", str(folder / "saved")),
            *(["--bf16"] if layout.bf16_zero1 else []),
            *options,
        ]
        if load is not None:
            saved = self._folder / load / "saved"
            (saved / "latest").write_text("global_step2")
            arguments += ["--load", str(saved)]
        result = self._python(
            *("-m", "deepspeed.launcher.runner"),
            f"--num_gpus={layout.pipeline * layout.tensor * layout.data}",
            f"--master_port={free_port()}",
            *([] if block is None else ["--module", "terapipe_ds.run"]),
            str(self._checkout / "pretrain_gpt.py"),
            *arguments,
        )
        return Result(
            result.returncode,
            {
                int(iteration): float(loss)
                for iteration, loss in re.findall(
                    r"iteration\s+(\d+)/.*?lm loss: (\S+)", result.stdout
                )
            },
            [
                (int(iteration), float(loss))
                for iteration, loss in re.findall(
                    r"validation loss at iteration (\d+).*?lm loss value: (\S+)", result.stdout
                )
            ],
            result.stdout + result.stderr,
        )

    def _python(
        self, *arguments: str, paths: list[Path] | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = [self._folder / "site", ROOT, *(paths or [])]
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, path)),
                "PYTHONWARNINGS": "ignore",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
