"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from terapipe_ds.files import temporary_for, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_makes_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.json"
    write_text(path, "whole\n")
    assert path.read_text() == "whole\n"
    assert names(path.parent) == ["plan.json"]


def test_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("a longer text than the new one")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["plan.json"]


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with path.open() as file:
        write_text(path, "new")
        assert file.read() == "old"


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A character that no encoding has, after much that could be written."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_write_that_ends_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the disk is full."""
    write_all = Path.write_text

    def write_half(path: Path, text: str, **_: str) -> int:
        write_all(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_failing_rename_leaves_no_temporary(tmp_path: Path) -> None:
    folder = tmp_path / "plan.json"
    folder.mkdir()
    with pytest.raises(OSError):
        write_text(folder, "new")
    assert names(tmp_path) == ["plan.json"]
    assert folder.is_dir()


def test_nobody_sees_half_a_file(tmp_path: Path) -> None:
    """Until the end the file is the old one, and what is written lies beside it."""
    path = tmp_path / "trace.json"
    path.write_text("old")
    with temporary_for(path) as temporary:
        assert temporary.parent == path.parent
        with temporary.open("w") as file:
            file.write("new, ")
            file.flush()
            assert path.read_text() == "old"
            file.write("whole")
        assert path.read_text() == "old"
    assert path.read_text() == "new, whole"
    assert names(tmp_path) == ["trace.json"]


def test_what_fails_inside_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(KeyError), temporary_for(path) as temporary:
        temporary.write_text("new")
        raise KeyError("span")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["trace.json"]
