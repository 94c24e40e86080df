"""Prints frames on a terminal: one line per field, coloured by kind, and the broken rule in red."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from upriver.cli.capture import Excerpt, Flow
from upriver.errors import FramingError, RemoteProtocolError, status_name
from upriver.wire.inspect.dump import DumpRow, FrameDump, rows

_HEX_SHOWN = 8
_ROW_RULE = "        +---------------+---------------+---------------+---------------+"


class Printer:
    """Prints excerpts one after the other; with ``drawing``, also their bytes four in a row."""

    def __init__(self, drawing: bool = False) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._drawing = drawing

    def show(self, excerpt: Excerpt) -> None:
        where = _where(excerpt.flow, excerpt.time)
        if excerpt.lost:
            self._print(f"{where}{excerpt.lost} bytes are missing from the capture", "yellow")
        if excerpt.skipped:
            self._print(f"{where}skipped: {excerpt.skipped}", "yellow")
        if excerpt.dump:
            self._show_frame(excerpt.dump, where)

    def _show_frame(self, dump: FrameDump, where: str) -> None:
        self._print(f"{where}{dump.title}", "bold red" if dump.error else "bold")
        if self._drawing:
            self._print(draw(dump.raw), "dim")
        for row in rows(dump):
            self._console.print(_line(row))
        if dump.error:
            self._print(_verdict(dump.error), "bold red")
        self._console.print()

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style))


def _where(flow: Flow | None, time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%H:%M:%S.%f} {flow}\n" if flow else ""


def _line(row: DumpRow) -> Text:
    text = Text(f"  {row.name:<21}", style="bold red" if row.broken else "cyan")
    text.append(f"{row.place if row.raw else '':<12}", style="dim")
    raw = "" if not row.raw else f"0x{row.raw.hex()}" if len(row.raw) <= _HEX_SHOWN else f"{len(row.raw)} bytes"
    text.append(f"{raw:<20} ", style="none")
    return text.append(row.note, style="red" if row.broken else "green")


def _verdict(error: RemoteProtocolError) -> str:
    answer = "closes the connection" if isinstance(error, FramingError) else f"answers {status_name(error.status)}"
    return f"  BROKEN: {error}. A server {answer}."


def draw(raw: bytes) -> str:
    """The bytes as the specification draws them.

    >>> print(draw(bytes.fromhex("80530000")))
          Byte/     0       |       1       |       2       |       3       |
            +---------------+---------------+---------------+---------------+
           0| 0x80          | 0x53 ('S')    | 0x00          | 0x00          |
            +---------------+---------------+---------------+---------------+
    """
    lines = ["      Byte/     0       |       1       |       2       |       3       |", _ROW_RULE]
    for at in range(0, len(raw), 4):
        cells = "".join(f"{_cell(byte):<15}|" for byte in raw[at : at + 4])
        lines += [f"{at:>8}|{cells}", _ROW_RULE]
    return "\n".join(lines)


def _cell(byte: int) -> str:
    return f" 0x{byte:02x} ('{chr(byte)}')" if 0x21 <= byte < 0x7F else f" 0x{byte:02x}"
