"""One line per event, ``event=... key=value ...``, through the standard ``logging``; never a document or a password."""

from __future__ import annotations

import logging

logger = logging.getLogger("upriver.node")


def info(event: str, **fields: object) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info(_line(event, fields))


def warning(event: str, **fields: object) -> None:
    logger.warning(_line(event, fields))


def failure(event: str, **fields: object) -> None:
    """Log an unexpected exception with its traceback; call it in the ``except`` block."""
    logger.exception(_line(event, fields))


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([f"event={event}", *(f"{key}={_shown(value)}" for key, value in fields.items())])


def _shown(value: object) -> str:
    """A value as one word, quoted if it contains spaces, quotes or equals signs."""
    text = str(value)
    plain = text.isprintable() and text and not any(each in text for each in ' "=')
    return text if plain else '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
