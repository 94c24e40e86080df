"""``upriver wire``: frames of the protocol, taken apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from upriver.cli.capture import CAPTURE_MAGICS, Excerpt, Follower, read_capture
from upriver.errors import ConfigError
from upriver.wire.constants import Dialect, Magic
from upriver.wire.inspect.conversation import CapturedConversation, DumpReader
from upriver.wire.inspect.dump import as_json


@click.group()
def wire() -> None:
    """Take frames of the protocol apart."""


@wire.command(short_help="Show frames field by field.")
@click.argument("source", metavar="HEX|FILE|-")
@click.option("--dialect", type=click.Choice(["auto", "dcp", "upr"]), default="auto", show_default=True,
              help="Dialect of the frames; auto goes by the size of each stream request.")  # fmt: skip
@click.option("--collections/--no-collections", default=None,
              help="Whether keys begin with a collection id.  [default: as the HELLO response says]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), help="Only connections of a capture that use this port.")
@click.option("--drawing", is_flag=True, help="Also draw the bytes, four in a row.")
@click.option("--json", "json_lines", is_flag=True, help="One JSON object per line.")
def decode(
    source: str, dialect: str, collections: bool | None, port: int | None, drawing: bool, json_lines: bool
) -> None:
    """Show frames field by field, and name the rule that a broken frame breaks.

    Frames come as hex digits, in a file, or with - from standard input. A file holds frames in binary or as hex text,
    or is a packet capture (pcap, pcapng), whose TCP streams are followed in both directions.

    The exit code is 1 if a frame was broken, otherwise 0.
    """
    from upriver.cli.wire_print import Printer

    conversation = partial(CapturedConversation, None if dialect == "auto" else Dialect(dialect), collections)
    printer = Printer(drawing)
    broken = False
    for excerpt in _excerpts(_read(source), conversation, port):
        broken |= excerpt.dump is not None and excerpt.dump.error is not None
        if json_lines:
            _print_json(excerpt)
        else:
            printer.show(excerpt)
    sys.exit(1 if broken else 0)


def _read(source: str) -> bytes:
    if source == "-":
        return _as_bytes(sys.stdin.buffer.read(), "standard input")
    path = Path(source)
    if _is_file(path):
        return _as_bytes(path.read_bytes(), source)
    digits = _hex_digits(source)
    if digits is None:
        raise ConfigError(f"{source[:60]!r} is neither a file nor hex digits")
    return digits


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # hex digits make a name that is too long for a file
        return False


def _as_bytes(raw: bytes, name: str) -> bytes:
    if raw.startswith(CAPTURE_MAGICS) or not raw or raw[0] in Magic._value2member_map_:
        return raw
    digits = _hex_digits(raw.decode("ascii", "replace"))
    if digits is None:
        raise ConfigError(f"{name} holds neither frames, nor hex digits, nor a packet capture")
    return digits


def _hex_digits(text: str) -> bytes | None:
    """Hex with spaces, colons, ``0x`` and ``#`` comments, as people paste it."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = " ".join(lines).replace(":", " ").replace(",", " ").split()
    try:
        return bytes.fromhex("".join(word.removeprefix("0x") for word in words))
    except ValueError:
        return None


def _excerpts(raw: bytes, conversation: Callable[[], CapturedConversation], port: int | None) -> Iterator[Excerpt]:
    if raw.startswith(CAPTURE_MAGICS):
        follower = Follower(conversation)
        for event in read_capture(raw, port):
            yield from follower.take(event)
        yield from follower.end()
        return
    reader = DumpReader(conversation())
    yield from map(Excerpt, reader.receive(raw))
    yield from map(Excerpt, reader.receive_eof())


def _print_json(excerpt: Excerpt) -> None:
    import orjson

    found: dict[str, Any] = as_json(excerpt.dump) if excerpt.dump else {}
    if excerpt.flow:
        found |= {"connection": str(excerpt.flow), "time": excerpt.time}
    if excerpt.lost:
        found["gap"] = excerpt.lost
    if excerpt.skipped:
        found["skipped"] = excerpt.skipped
    sys.stdout.buffer.write(orjson.dumps(found) + b"\n")
    sys.stdout.buffer.flush()
