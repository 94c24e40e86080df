"""The report is one page that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from upriver.spark.tables.progress import Batch, Journal, Lag
from upriver.spark.tables.report import page, write_report


def batches(count: int) -> list[Batch]:
    step = {"name": "shop.orders", "rows": 10, "merged_ranges": 1, "held": False, "rows_current": 5, "rows_tail": 2}
    return [
        Batch(number, 1e9 + number, rows=10 * number + 1, total_s=0.5, read_s=0.2, log_bytes=100,
              rollbacks=number == 3, tables={"shop.orders": step})
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
