"""Starts a benchmark on several CPU ranks of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), f"--num_gpus={ranks}", f"--master_port={port}"]
    command += [str(Path(script).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    path = f"{launcher.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, **environment}
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


def pin_to_core() -> None:
    """One core for each rank; before torch starts its threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
