"""Starts a benchmark on several ranks of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launch(
    script: str,
    ranks: int,
    *,
    arguments: Sequence[str] | None = None,
    quiet: bool = False,
    **environment: str,
) -> int:
    """Runs this program again on ``ranks`` ranks under DeepSpeed's launcher.

    Args:
        script: the benchmark's file.
        ranks: how many.
        arguments: for the script; this program's own if None.
        quiet: whether ranks' output is shown only if one fails.
        environment: more variables for them.

    Returns:
        The launcher's exit code.
    """
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), f"--num_gpus={ranks}", f"--master_port={_free_port()}"]
    command += [str(Path(script).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    settings = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": _path_of_environment(),
        **environment,
    }
    ended = subprocess.run(
        command,
        env={**os.environ, **settings},
        check=False,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    if quiet and ended.returncode:
        sys.stderr.buffer.write(ended.stdout[-20_000:])
    return ended.returncode


def result_of(
    script: str, ranks: int, out: Path, *more: str, quiet: bool = False, **environment: str
) -> Any:
    """Runs this program again on ranks, which write their result; ends the program if they fail.

    Args:
        script: the benchmark's file.
        ranks: how many.
        out: the JSON file that rank 0 is told to write, by ``--out``.
        more: arguments after this program's own.
        quiet: whether ranks' output is shown only if one fails.
        environment: more variables for them.

    Returns:
        What the file holds.
    """
    arguments = [*sys.argv[1:], f"--out={out}", *more]
    code = launch(script, ranks, arguments=arguments, quiet=quiet, **environment)
    if code:
        sys.exit(code)
    return json.loads(out.read_text())


def start_on_one_device(
    script: str, ranks: int, *, arguments: Sequence[str], folder: Path, device: str
) -> list[subprocess.Popen[bytes]]:
    """Starts this program on ranks that share one device, which DeepSpeed's launcher does not do.

    Args:
        script: the benchmark's file.
        ranks: how many.
        arguments: for the script.
        folder: where ``rank0.log`` and so on hold what the ranks print.
        device: ``"cpu"``, or ``"cuda"`` for the first GPU.

    Returns:
        The ranks' processes, to be waited for or killed.
    """
    settings = {
        "DS_ACCELERATOR": device,
        "OMP_NUM_THREADS": "1",
        "PATH": _path_of_environment(),
        "WORLD_SIZE": str(ranks),
        # DeepSpeed takes the device from it, and nothing else here.
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    # Kernels in step with the host would hide what the order of streams leaves open; and some
    # builds of torch come with fp32 products in TF32.
    unset = ("CUDA_LAUNCH_BLOCKING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    processes = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(script).resolve()), *arguments],
                    env={**kept, **settings, "RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _path_of_environment() -> str:
    """``PATH`` with this environment's programs first: DeepSpeed's compiled helpers want them."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def pin_to_core() -> None:
    """One core for each rank; before torch starts its threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
