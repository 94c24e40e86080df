"""Vbuckets as people write them: ``0-511,600``."""

from __future__ import annotations

from upriver.errors import ConfigError


def parse_ranges(text: str) -> list[int]:
    """The numbers, in order and once each.

    >>> parse_ranges("7,0-2")
    [0, 1, 2, 7]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{text!r} are not vbuckets; write 7 or 0-511 or 0-511,600")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)
