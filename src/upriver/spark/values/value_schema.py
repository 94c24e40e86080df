"""Check ``valueSchema`` before Spark parses it as part of a larger schema, so that an error names the field.

Spark parses it afterwards, so only what is certainly wrong is refused here.
"""

from __future__ import annotations

import re

from upriver.errors import ConfigError

TYPES = (
    "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL", "STRING", "BINARY", "DATE",
    "TIMESTAMP", "TIMESTAMP_NTZ", "VARIANT", "ARRAY", "MAP", "STRUCT",
)  # fmt: skip
_ALSO = {"BYTE", "SHORT", "INTEGER", "LONG", "REAL", "DEC", "NUMERIC", "CHAR", "CHARACTER", "VARCHAR", "TIMESTAMP_LTZ"}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'(?:[^'\\]|\\.|'')*'|[A-Za-z0-9_\u0080-\U0010ffff]+|\S)", re.DOTALL)
_EXAMPLE = 'write fields and types, such as "name STRING, age INT, tags ARRAY<STRING>"'


def check_value_schema(text: str) -> None:
    """``ConfigError`` unless this is a list of fields with types that JSON can be read as."""
    tokens = _TOKEN.findall(text)
    rest = _fields(tokens, "")
    if rest:
        raise ConfigError(f"valueSchema: {rest[0]!r} is not expected there; {_EXAMPLE}")


def _fields(tokens: list[str], inside: str) -> list[str]:
    """Skip fields up to the end or the closing bracket; the tokens that are left."""
    while True:
        if len(tokens) < 2 or tokens[0] in (",", ">", "<", ":"):
            raise ConfigError(f"valueSchema: a field{_of(inside)} has no name or no type; {_EXAMPLE}")
        name = f"{inside}{tokens[0].strip('`')}"
        tokens = _type(tokens[2:] if tokens[1] == ":" else tokens[1:], name)
        tokens = _remarks(tokens, name)
        if not tokens or tokens[0] == ">":
            return tokens
        if tokens[0] != ",":
            raise ConfigError(f"valueSchema: {tokens[0]!r} after the type of '{name}' is not expected; {_EXAMPLE}")
        tokens = tokens[1:]


def _of(inside: str) -> str:
    return f" of '{inside.rstrip('.')}'" if inside else ""


def _type(tokens: list[str], name: str) -> list[str]:
    word = tokens[0].upper() if tokens else ""
    if word not in TYPES and word not in _ALSO:
        said = f"{tokens[0]!r} is no type that a field of a document can have" if tokens else "there is no type"
        raise ConfigError(f"valueSchema: field '{name}': {said}; valid are {', '.join(TYPES)}")
    if word not in ("ARRAY", "MAP", "STRUCT"):
        return _without_parameters(tokens[1:])
    tokens = _expect(tokens[1:], "<", name, word)
    if word == "STRUCT":
        tokens = _fields(tokens, f"{name}.")
    elif word == "ARRAY":
        tokens = _type(tokens, name)
    else:
        if not tokens or tokens[0].upper() != "STRING":
            raise ConfigError(f"valueSchema: field '{name}': the keys of a MAP are STRING, as in JSON")
        tokens = _type(_expect(tokens[1:], ",", name, word), name)
    return _expect(tokens, ">", name, word)


def _without_parameters(tokens: list[str]) -> list[str]:
    """Skip the ``(10, 2)`` of a decimal."""
    return tokens[tokens.index(")") + 1 :] if tokens and tokens[0] == "(" and ")" in tokens else tokens


def _remarks(tokens: list[str], name: str) -> list[str]:
    """Skip a comment or a collation."""
    words = [token.upper() for token in tokens[:2]]
    if words == ["NOT", "NULL"]:
        raise ConfigError(f"valueSchema: field '{name}': any document may lack a field, so leave out NOT NULL")
    return _remarks(tokens[2:], name) if words[:1] in (["COMMENT"], ["COLLATE"]) else tokens


def _expect(tokens: list[str], token: str, name: str, word: str) -> list[str]:
    if not tokens or tokens[0] != token:
        raise ConfigError(f"valueSchema: field '{name}': {word} lacks its {token!r}; {_EXAMPLE}")
    return tokens[1:]
