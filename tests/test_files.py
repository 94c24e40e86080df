"""Small files are replaced whole, and for good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upriver.files import replace_file


def test_a_file_is_there_whole_and_can_be_read_by_others(tmp_path: Path) -> None:
    os.umask(mask := os.umask(0))
    for text in ("one", "another, longer", ""):
        replace_file(tmp_path / "state", text)
        assert (tmp_path / "state").read_text() == text
    assert os.listdir(tmp_path) == ["state"]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    replace_file(tmp_path / "users", "secret", private=True)
    assert (tmp_path / "users").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch, step: str) -> None:
    replace_file(tmp_path / "state", "old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "state", "new")
    assert os.listdir(tmp_path) == ["state"]
    assert (tmp_path / "state").read_text() == "old"


def test_the_content_is_on_disk_before_the_name_is_and_the_name_before_it_returns(tmp_path: Path, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".")[0])
        fsync(descriptor)

    def noted_replace(old: str, new: str) -> None:
        done.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    replace_file(tmp_path / "state", "x")
    assert done == ["state", "replace", tmp_path.name]
