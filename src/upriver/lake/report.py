"""A picture of a run: one HTML page that needs nothing else, drawn from the journal of batches.

Charts are SVG made here; the few lines of script only show the values under the pointer. A line ends where nothing
happened for a while, one peak does not flatten everything else, and an axis has one unit.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from upriver.lake.journal import Batch, Lag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 920, 210, 64, 16, 12, 26
GAP_S = 5.0  # a line does not cross a longer time without values, unless they are always so far apart
PEAK = 5.0  # values this many times higher than nearly all others are cut off, and the caption says so
COLORS = ("#2563eb", "#f59e0b", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#b45309")


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    area: bool = False


def write_report(path: str | Path, batches: Sequence[Batch], lags: Sequence[Lag], title: str) -> None:
    """Draw the run into a file."""
    Path(path).write_text(page(batches, lags, title), encoding="utf-8")


def page(batches: Sequence[Batch], lags: Sequence[Lag], title: str) -> str:
    """The whole page."""
    busy = [batch for batch in batches if batch.rows or batch.rollbacks]
    start = min((batch.at - batch.total_s for batch in busy), default=0.0)
    rolled = [batch.at - start for batch in busy if batch.rollbacks]
    until = max([0.0, *(batch.at - start for batch in busy), *(lag.at - start for lag in lags)])
    charts = "".join(
        _figure(heading, note, series, unit, chart(series, rolled, unit, until))
        for heading, note, series, unit in _charts(busy, lags, start)
    )
    when = datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if busy else "nothing ran"
    return (
        _PAGE.replace("{title}", html.escape(title))
        .replace("{when}", when)
        .replace("{tiles}", _tiles(busy))
        .replace("{charts}", charts)
        .replace("{table}", _table(busy))
    )


def _charts(
    busy: Sequence[Batch], lags: Sequence[Lag], start: float
) -> list[tuple[str, str, list[Series], Callable[[float], str]]]:
    def over(value: Callable[[Batch], float]) -> list[tuple[float, float]]:
        return [(batch.at - start, value(batch)) for batch in busy]

    seconds = [
        Series("read and log", over(lambda b: b.read_s), area=True),
        Series("whole batch", over(lambda b: b.total_s)),
    ]
    behind = [Series("seconds behind", over(lambda b: b.behind_s), area=True)]
    waits = [(lag.at - start, float(lag.lag)) for lag in lags if lag.at >= start]
    waiting = [Series("changes behind", waits, area=True)]
    per_row = [
        Series("change log", over(lambda b: b.log_bytes / max(b.rows, 1)), area=True),
        Series("log, tail and current", over(lambda b: (b.log_bytes + b.table_bytes) / max(b.rows, 1))),
    ]
    return [
        (
            "Throughput",
            "changes per second, batch by batch",
            [Series("changes/s", _speed(busy, start), area=True)],
            amount,
        ),
        ("Lag in changes", "what the bucket had and the tables did not", waiting, amount),
        ("Lag in time", "how long the newest change of a batch had waited when it was committed", behind, duration),
        ("Batch time", "reading the bucket and writing the log, and all of it", seconds, duration),
        ("Bytes written per change", "peaks are parts of current being rewritten", per_row, size),
        ("Table growth", "rows of current, and of its tail", _growth(busy, start), amount),
    ]


def _speed(busy: Sequence[Batch], start: float) -> list[tuple[float, float]]:
    """The rate of each batch for as long as it took, and zero between batches."""
    points: list[tuple[float, float]] = []
    for batch in busy:
        begin, end = batch.at - batch.total_s - start, batch.at - start
        if points and begin - points[-1][0] > 0.05:
            points += [(points[-1][0], 0.0), (begin, 0.0)]
        rate = batch.rows / max(batch.total_s, 1e-3)
        points += [(begin, rate), (end, rate)]
    return points


def _growth(busy: Sequence[Batch], start: float) -> list[Series]:
    names = sorted({name for batch in busy for name in batch.tables})
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    tail: list[tuple[float, float]] = []
    known = dict.fromkeys(names, (0, 0))
    for batch in busy:
        for name, step in batch.tables.items():
            if not step["held"]:
                known[name] = step["rows_current"], step["rows_tail"]
        for name in names:
            rows[name].append((batch.at - start, float(known[name][0])))
        tail.append((batch.at - start, float(sum(both[1] for both in known.values()))))
    shown = [Series(name, points) for name, points in rows.items()][:6]
    return [*shown, Series("tail, all tables", tail)]


def chart(series: Sequence[Series], rolled: Sequence[float], unit: Callable[[float], str], until: float = 0.0) -> str:
    """Lines over time as SVG, up to ``until`` at least; rollbacks are marked."""
    points = [point for one in series for point in one.points]
    if not points:
        return "<p class='none'>nothing to show</p>"
    x_max = max(max(x for x, _ in points), until, 1e-9)
    y_max = ticks(top_of(series) or 1.0, unit)[-1]

    def x(value: float) -> float:
        return round(LEFT + value / x_max * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - min(value / y_max, 1.0) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [_grid(x, y, x_max, y_max, unit)]
    parts += [f'<line class="back" x1="{x(at)}" x2="{x(at)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>' for at in rolled]
    for one, color in zip(series, COLORS, strict=False):
        parts.append(_line(one, color, x, y))
    data = [{"n": s.name, "p": [[x(a), y(b), duration(a), unit(b)] for a, b in _thin(s.points)]} for s in series]
    legend = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(one.name)}</span>'
        for one, color in zip(series, COLORS, strict=False)
    )
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {HEIGHT}" data-p="{html.escape(json.dumps(data))}">'
        f'{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg></div>'
        f'<div class="legend">{legend}<b></b></div>'
    )


def top_of(series: Sequence[Series]) -> float:
    """The top of a chart: the highest value, or one above nearly all values if a few are far above the rest.

    >>> top_of([Series("s", [(float(n), 10.0) for n in range(99)] + [(99.0, 400.0)])])
    12.5
    """
    values = sorted(y for one in series for _, y in one.points)
    if not values:
        return 0.0
    usual = values[int(0.97 * (len(values) - 1))]
    return 1.25 * usual if values[-1] > PEAK * usual > 0 else values[-1]


def _stretches(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points between two idle times."""
    steps = sorted(b[0] - a[0] for a, b in pairwise(points))
    longest = max(GAP_S, 10 * steps[len(steps) // 2]) if steps else GAP_S
    found: list[list[tuple[float, float]]] = []
    for point in points:
        if not found or point[0] - found[-1][-1][0] > longest:
            found.append([])
        found[-1].append(point)
    return found


def _thin(points: Sequence[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """Few enough points to draw, keeping the peaks."""
    if len(points) <= most:
        return list(points)
    step = -(-len(points) // most)
    return [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]


def _grid(
    x: Callable[[float], float], y: Callable[[float], float], x_max: float, y_max: float, unit: Callable[[float], str]
) -> str:
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(at)}" y2="{y(at)}"/>'
        f'<text x="{LEFT - 8}" y="{y(at) + 4}" text-anchor="end">{label(at, y_max, unit)}</text>'
        for at in ticks(y_max, unit)
    )
    return lines + "".join(
        f'<text x="{x(at)}" y="{HEIGHT - 8}" text-anchor="{"start" if at == 0 else "middle"}">'
        f"{label(at, x_max, duration)}</text>"
        for at in ticks(x_max, duration)
        if at <= 0.98 * x_max
    )


def ticks(most: float, unit: Callable[[float], str]) -> list[float]:
    """Round numbers from zero to at least ``most``, in the unit that they will be shown in.

    >>> ticks(31_800, amount), ticks(500, duration), ticks(4096, size)
    ([0, 10000, 20000, 30000, 40000], [0, 120, 240, 360, 480, 600], [0, 1024, 2048, 3072, 4096])
    """
    scale = _scale_of_size(most) if unit is size else _scale_of_time(most) if unit is duration else 1.0
    rough = most / scale / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * nice for nice in (1, 2, 2.5, 5, 10)), key=lambda step: abs(step - rough)) * scale
    return [_whole(step * index) for index in range(math.ceil(most / step - 1e-9) + 1)]


def _scale_of_size(most: float) -> float:
    return 1024.0 ** max(0, math.floor(math.log(most, 1024)))


def _scale_of_time(most: float) -> float:
    return 1.0 if most < 240 else 60.0 if most < 4 * 3600 else 3600.0


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 9)


def label(value: float, most: float, unit: Callable[[float], str]) -> str:
    """A tick in the unit that suits the end of its axis, so that one axis has one unit.

    >>> [label(at, 1500, amount) for at in (0, 500, 1000, 1500)]
    ['0', '0.5 k', '1 k', '1.5 k']
    >>> label(0.5, 1.5, duration), label(0.5, 0.5, duration), label(90, 600, duration)
    ('0.5 s', '500 ms', '1:30')
    """
    if not value:
        return "0"
    for limit, suffix in _SCALES[unit]:
        if most >= limit:
            return f"{value / limit:.3g} {suffix}" if suffix else _clock(value)
    return unit(value)


def _note_of_peak(series: Sequence[Series], unit: Callable[[float], str]) -> str:
    highest = max((y for one in series for _, y in one.points), default=0.0)
    return f"; a peak of {unit(highest)} is cut off" if highest > top_of(series) else ""


def _line(one: Series, color: str, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = _thin(one.points)
    dots = (
        "".join(f'<circle cx="{x(a)}" cy="{y(b)}" r="2.4" fill="{color}"/>' for a, b in points)
        if len(points) < 60
        else ""
    )
    floor, lines = HEIGHT - BOTTOM, ""
    for part in _stretches(points):
        path = " ".join(f"{x(a)},{y(b)}" for a, b in part)
        if one.area:
            lines += f'<polygon points="{x(part[0][0])},{floor} {path} {x(part[-1][0])},{floor}" fill="{color}22"/>'
        lines += f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
    return lines + dots


def _figure(heading: str, note: str, series: Sequence[Series], unit: Callable[[float], str], drawing: str) -> str:
    note += _note_of_peak(series, unit)
    return f"<figure><figcaption><b>{html.escape(heading)}</b> {html.escape(note)}</figcaption>{drawing}</figure>"


def _tiles(busy: Sequence[Batch]) -> str:
    rows, spent = sum(batch.rows for batch in busy), sum(batch.total_s for batch in busy)
    times = sorted(batch.total_s for batch in busy)
    values = [
        ("changes", amount(rows)),
        ("batches", amount(len(busy))),
        ("changes per second of work", amount(rows / spent if spent else 0)),
        ("median batch", duration(times[len(times) // 2] if times else 0)),
        ("read", size(sum(batch.value_bytes for batch in busy))),
        ("written", size(sum(batch.log_bytes + batch.table_bytes for batch in busy))),
        ("rollbacks repaired", amount(sum(batch.rollbacks for batch in busy))),
    ]
    return "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in values)


def _table(busy: Sequence[Batch]) -> str:
    """The last batches in numbers."""
    rows = "".join(
        f"<tr><td>{b.batch}</td><td>{datetime.fromtimestamp(b.at, UTC):%H:%M:%S}</td><td>{b.rows:,}</td>"
        f"<td>{duration(b.read_s)}</td><td>{duration(b.total_s)}</td><td>{size(b.log_bytes + b.table_bytes)}</td>"
        f"<td>{sum(step['merged_ranges'] for step in b.tables.values())}</td><td>{b.rollbacks or ''}</td></tr>"
        for b in list(busy)[-40:][::-1]
    )
    heads = ("batch", "at", "changes", "read", "whole", "written", "parts merged", "rollbacks")
    row = "".join(f"<th>{head}</th>" for head in heads)
    return f'<div class="wide"><table><tr>{row}</tr>{rows}</table></div>'


def amount(value: float) -> str:
    """A count for people.

    >>> amount(999), amount(12_345), amount(4_200_000)
    ('999', '12.3 k', '4.2 M')
    """
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things.

    >>> counted(1, "change"), counted(2, "batch", "batches")
    ('1 change', '2 batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(value: float) -> str:
    """Bytes for people."""
    scale = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
    for limit, suffix in scale:
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f} B"


def duration(value: float) -> str:
    """Seconds for people.

    >>> duration(0.25), duration(3), duration(250), duration(7300)
    ('250 ms', '3.0 s', '4:10', '2:01:40')
    """
    if value < 1:
        return f"{value * 1000:.0f} ms" if value else "0"
    if value < 120:
        return f"{value:.1f} s"
    return _clock(value)


def _clock(value: float) -> str:
    whole = int(value)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_SCALES: dict[Callable[[float], str], list[tuple[float, str]]] = {
    amount: [(1e9, "G"), (1e6, "M"), (1e3, "k")],
    size: [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")],
    duration: [(240, ""), (1, "s")],
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root{color-scheme:light dark;--ink:#0f172a;--dim:#64748b;--line:#e2e8f0;--card:#fff;--page:#f8fafc}
@media(prefers-color-scheme:dark){:root{--ink:#e2e8f0;--dim:#94a3b8;--line:#334155;--card:#1e293b;--page:#0f172a}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;max-width:980px;
padding:28px 20px}h1{font-size:22px;margin:0}header p{color:var(--dim);margin:4px 0 20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:10px;margin-bottom:18px}
.tiles div,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tiles b{display:block;font-size:20px}.tiles span,figcaption,.legend{color:var(--dim);font-size:13px}
.tiles b,.legend span,td,th{white-space:nowrap}.wide{overflow-x:auto}figure{margin:0 0 14px}
figcaption b{color:var(--ink);font-size:15px;margin-right:6px}svg{width:100%;min-width:720px;display:block}
@media(prefers-color-scheme:dark){polyline,circle,.legend i,.back{filter:brightness(1.4)}}
text{font-size:11px;fill:var(--dim)}.grid{stroke:var(--line)}.back{stroke:#dc2626;stroke-width:1.5;stroke-dasharray:4 3}
.cursor{stroke:var(--dim);visibility:hidden}.legend span{display:inline-block;margin-right:14px}
.legend i{display:inline-block;width:10px;
height:10px;border-radius:3px;margin-right:5px}.legend b{float:right;font-weight:500;color:var(--ink)}
.none{color:var(--dim)}table{width:100%;border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line)}th{color:var(--dim);font-weight:500}
</style><header><h1>{title}</h1><p>{when}. Dashed red lines are rollbacks that were repaired.</p></header>
<div class="tiles">{tiles}</div>{charts}<figure><figcaption><b>Last batches</b></figcaption>{table}</figure><script>
document.querySelectorAll('svg').forEach(s=>{const d=JSON.parse(s.dataset.p),c=s.querySelector('.cursor'),
o=s.parentNode.nextElementSibling.querySelector('b');s.onmousemove=e=>{const r=s.getBoundingClientRect(),
x=(e.clientX-r.left)/r.width*920;let t='',at='',px=0;d.forEach(l=>{if(!l.p.length)return;
const p=l.p.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);px=p[0];at=p[2];t+=(t?' · ':'')+l.n+' '+p[3]});
c.setAttribute('x1',px);c.setAttribute('x2',px);c.style.visibility='visible';o.textContent=at+': '+t};
s.onmouseleave=()=>{c.style.visibility='hidden';o.textContent=''}})</script></html>
"""
