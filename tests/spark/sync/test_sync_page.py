"""The examples in docs/sync.md run, in this order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import upriver.spark

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[3] / "docs" / "sync.md"
BLOCKS = re.compile(r"^```(python notebook|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_does_what_it_shows(spark, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(upriver.spark, "session", lambda *_: spark)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    blocks = BLOCKS.findall(PAGE.read_text())
    assert [language for language, _ in blocks] == ["python notebook", "text"] * 3
    for language, text in blocks:
        if language == "text":
            assert printed == text
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs/sync.md", "exec"), names)
        printed = out.getvalue()
