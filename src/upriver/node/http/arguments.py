"""Numbers and flags among the arguments of a request, checked before anything is done; a refusal names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from upriver.node.http.wire import HttpError

_NUMBER = re.compile(r"-?[0-9]{1,20}\Z")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def number_or_none(arguments: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A number from ``low`` to ``high``; None if it is not there, or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    if not _NUMBER.match(text) or not low <= int(text) <= high:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be a number from {low} to {high}", name)
    return int(text)


def flag_or_none(arguments: Mapping[str, Any], name: str) -> bool | None:
    """A flag as forms (``0``, ``1``) and JSON write it; None if it is not there, or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    if text not in _FLAGS:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be true or false", name)
    return _FLAGS[text]


def choice_or_none(arguments: Mapping[str, Any], name: str, allowed: Mapping[str, Any]) -> Any:
    """What the text stands for; None if it is not there, or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    for word, value in allowed.items():
        if word.lower() == text:
            return value
    raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be one of {', '.join(allowed)}", name)


def _text(arguments: Mapping[str, Any], name: str) -> str:
    return str(arguments.get(name, "")).strip().lower()
