"""The notebook in docs/spark.md runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
BLOCKS = re.compile(r"^```(python notebook|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tour_does_what_it_shows(spark, monkeypatch):
    import upriver.spark

    monkeypatch.setattr(upriver.spark, "session", lambda *_: spark)
    names: dict[str, object] = {}
    printed = ""
    blocks = BLOCKS.findall(PAGE.read_text())
    assert len(blocks) > 8
    for language, text in blocks:
        if language == "text":
            matches = doctest.OutputChecker().check_output(text, printed.rstrip() + "\n", doctest.ELLIPSIS)
            assert matches, f"the page shows\n{text}\nbut it was\n{printed}"
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs/spark.md", "exec"), names)
        printed = out.getvalue()
