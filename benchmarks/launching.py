"""Starts a benchmark on several CPU ranks of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def launch(script: str, ranks: int, **environment: str) -> int:
    """Runs this program again on ``ranks`` ranks under DeepSpeed's launcher.

    Args:
        script: the benchmark's file; it gets this program's arguments.
        ranks: how many.
        environment: more variables for them.

    Returns:
        The launcher's exit code.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), f"--num_gpus={ranks}", f"--master_port={port}"]
    command += [str(Path(script).resolve()), *sys.argv[1:]]
    path = f"{launcher.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, **environment}
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


def pin_to_core() -> None:
    """One core for each rank; before torch starts its threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
