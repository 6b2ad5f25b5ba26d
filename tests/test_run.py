"""``terapipe_ds.run`` runs a script as Python itself would, and loads nothing that it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

REPORT = """
import json, os, sys
import beside
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[0],
    "folder": os.getcwd(),
    "loaded": sorted({"deepspeed", "torch", "megatron", "terapipe_ds.runtime"} & set(sys.modules)),
}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder to start in, and a script in another one."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").touch()
    (tmp_path / "scripts" / "report.py").write_text(REPORT)
    (tmp_path / "sliced.json").write_text('{"terapipe": {"slices": 4}}')
    (tmp_path / "stock.json").write_text("{}")
    return tmp_path


def python(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "terapipe_ds.run", *arguments, **env)


@pytest.mark.parametrize("config", ["sliced.json", "stock.json"])
def test_the_script_sees_what_it_would_see_without(project: Path, config: str) -> None:
    arguments = ("scripts/report.py", "--local_rank=1", "--deepspeed_config", config, "-x", "a b")
    alone = json.loads(python(project, *arguments).stdout)
    # DeepSpeed's launcher puts the rank in front of what it believes to be the script's arguments.
    wrapped = run(project, "--local_rank=1", arguments[0], *arguments[2:])
    assert json.loads(wrapped.stdout) == alone
    assert alone["loaded"] == []


def test_a_script_behind_a_link_finds_what_is_beside_it(project: Path) -> None:
    (project / "link.py").symlink_to(project / "scripts" / "report.py")
    found = json.loads(run(project, "link.py").stdout)
    assert found == json.loads(python(project, "link.py").stdout)


@pytest.mark.parametrize(
    ("ends", "code"), [("raise SystemExit(7)", 7), ("1 / 0", 1), ("pass", 0), ("exit('no')", 1)]
)
def test_exit_code(project: Path, ends: str, code: int) -> None:
    (project / "ends.py").write_text(ends)
    assert run(project, "ends.py").returncode == code


@pytest.mark.parametrize(
    ("arguments", "env", "line"),
    [
        ((), {}, "found nothing where the script's name was due; usage: deepspeed"),
        (("--local_rank=0",), {}, "found nothing where the script's name was due; usage: "),
        (("--lr", "1"), {}, "found --lr where the script's name was due; usage: "),
        (("--local_rank=0", "none.py"), {}, "found no script 'none.py' in "),
        (("scripts/report.py",), {"TERAPIPE": "off"}, "TERAPIPE: found 'off', allowed are 0 "),
    ],
)
def test_refused_in_one_line(
    project: Path, arguments: tuple[str, ...], env: dict[str, str], line: str
) -> None:
    result = run(project, *arguments, **env)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"terapipe_ds.run: {line}")
    assert result.stderr.count("\n") == 1
    silent = run(project, *arguments, LOCAL_RANK="1", **env)
    assert (silent.returncode, silent.stderr) == (2, "")


def test_what_a_script_does_at_its_exit_finds_its_own_main(project: Path) -> None:
    (project / "ends.py").write_text(
        "import atexit, sys\nvalue = 3\n"
        "atexit.register(lambda: print(sys.modules['__main__'].value, value))"
    )
    assert run(project, "ends.py").stdout == "3 3\n"


def test_deepspeed_is_prepared_when_the_script_imports_it(project: Path) -> None:
    (project / "script.py").write_text(
        "from deepspeed import initialize\nprint(hasattr(initialize, 'terapipe_ds_stock'))"
    )
    result = run(project, "script.py", "--deepspeed_config", "sliced.json")
    assert result.stdout.split()[-1:] == ["True"], result.stderr
