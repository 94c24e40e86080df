"""The report is one page that needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.lake.journal import Batch, Journal, Lag
from upriver.lake.report import amount, duration, label, page, size, ticks, write_report


def batches(count: int) -> list[Batch]:
    step = {"name": "shop.orders", "rows": 10, "merged_ranges": 1, "held": False, "rows_current": 5, "rows_tail": 2}
    return [
        Batch(
            number,
            1e9 + number,
            rows=10 * number + 1,
            total_s=0.5,
            read_s=0.2,
            log_bytes=100,
            rollbacks=number == 3,
            tables={"shop.orders": step},
        )
        for number in range(count)
    ]


class Links(HTMLParser):
    """Everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]


def test_it_fetches_nothing_and_shows_every_chart_and_the_rollback() -> None:
    text = page(batches(10), [Lag(1e9 + 1, 5)], "sync <of> travel")
    links = Links()
    links.feed(text)
    assert links.found == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.count("<svg") == 6
    assert 'class="back"' in text
    assert "sync &lt;of&gt; travel" in text


@pytest.mark.parametrize("unit", [amount, duration, size])
@given(most=st.floats(1e-3, 1e12))
def test_an_axis_has_a_handful_of_different_labels_and_holds_every_value(unit, most: float) -> None:
    found = ticks(most, unit)
    assert found[0] == 0
    assert found[-1] >= most * (1 - 1e-9)
    assert 3 <= len(found) <= 8
    if most > 10:  # below that, labels in whole bytes or tenths are equal
        assert len({unit(at) for at in found}) == len(found)


def test_throughput_is_drawn_for_as_long_as_a_batch_took_and_is_zero_between_batches() -> None:
    some = [Batch(0, 1e9 + 4, rows=400, total_s=4.0), Batch(1, 1e9 + 10, rows=100, total_s=1.0)]
    text = page(some, [], "two")
    points = re.search(r'<polyline points="([^"]+)"', text)
    heights = [float(point.split(",")[1]) for point in points[1].split()] if points else []
    assert heights[0] == heights[1] == heights[4] == heights[5]  # both at 100/s
    assert heights[2] == heights[3] > heights[0]  # nothing


def drawn(text: str) -> list[list[list[float]]]:
    """The lines of every chart: their points."""
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    lines = [re.findall(r'<polyline points="([^"]+)"', chart) for chart in charts]
    return [[[float(n) for point in line.split() for n in point.split(",")] for line in chart] for chart in lines]


def test_lines_have_a_gap_where_nothing_happened() -> None:
    early, late = batches(20), [replace(batch, at=batch.at + 3600) for batch in batches(20)]
    batch_time = drawn(page([*early, *late], [], "two runs"))[2]
    assert len(batch_time) == 4, "two series, each before and after the pause"


def test_the_first_load_does_not_flatten_what_follows() -> None:
    load = Batch(0, 1e9, rows=10_000_000, total_s=60.0, read_s=30.0)
    small = [Batch(n, 1e9 + n, rows=10, total_s=0.5, read_s=0.2) for n in range(1, 100)]
    text = page([load, *small], [], "a load")
    heights = [210 - height for height in drawn(text)[2][1][3::2]]
    assert min(heights) > 60, "half a second is drawn as something"
    assert "a peak of 60.0 s is cut off" in text


def test_an_axis_has_one_unit() -> None:
    shown = [label(at, 1.5, duration) for at in ticks(1.5, duration)]
    assert {text.split(" ")[-1] for text in shown if text != "0"} == {"s"}


def test_a_run_without_batches_has_a_page_too() -> None:
    assert "nothing ran" in page([], [], "empty")


def test_long_runs_are_drawn_with_few_points() -> None:
    assert len(page(batches(20_000), [], "long")) < 800_000


def test_the_journal_survives_a_line_cut_off_by_a_crash(tmp_path) -> None:
    journal = Journal(str(tmp_path))
    for batch in batches(3):
        journal.add(batch)
    with journal.path.open("a") as file:
        file.write('{"batch": 3, "at"')
    assert [batch.batch for batch in journal.read()] == [0, 1, 2]
    write_report(tmp_path / "r.html", list(journal.read()), journal.lags(), "t")
    assert (tmp_path / "r.html").stat().st_size > 1000
