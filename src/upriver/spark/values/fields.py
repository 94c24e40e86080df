"""JSON documents as the struct of a ``valueSchema``, field by field, the way ``from_json`` reads them.

Only a field that does not fit is null; its value is kept beside the struct. Every document is parsed by itself, so a
value always comes from its own document.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.types as pt

from upriver.lake.columns import dumps, parser_for

Fit = Callable[[Any], Any]  # a value as its column takes it
_NONE = type(None)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WORDS = {"NaN": "nan", "Infinity": "inf", "+Infinity": "inf", "-Infinity": "-inf", "INF": "inf", "+INF": "inf",
          "-INF": "-inf"}  # fmt: skip
_DATE = re.compile(r"\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?\s*", re.DOTALL)
_MOMENT = re.compile(
    r"\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{1,9}))?)?\s*(\S+)?)?)?)?\s*"
)
_ZONE = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?")


class Misfit(Exception):
    """A value that does not fit its field; ``left`` is the part that does."""

    def __init__(self, left: Any = None) -> None:
        super().__init__()
        self.left = left


def fitted(column: pa.Array, kind: pa.StructType) -> tuple[pa.Array, pa.Array]:
    """The documents as structs, null where one is not a JSON object, and as text the JSON of what did not fit."""
    values = column.to_pylist()
    parse = _with_decimals if _has(kind, pt.is_decimal) else parser_for(column)
    documents = [None if value is None else parse(value) for value in values]
    left: dict[int, dict[str, Any]] = {}
    arrays = [_column(documents, field, left) for field in kind]
    mask = pa.array([document is None for document in documents], pa.bool_())
    struct = pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask)
    unfit: list[str | None] = [
        value.decode(errors="replace") if document is None and value is not None else None
        for document, value in zip(documents, values, strict=True)
    ]
    for index, fields in left.items():
        unfit[index] = dumps({name: _plain(value) for name, value in fields.items()})
    return struct, pa.array(unfit, pa.string())


def _with_decimals(value: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(value, parse_float=Decimal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _plain(value: Any) -> Any:
    """A value as JSON has it, with floats for decimals."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _has(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return test(kind) or any(_has(one, test) for one in inner)


def _column(documents: Sequence[dict[str, Any] | None], field: pa.Field, left: dict[int, dict[str, Any]]) -> pa.Array:
    name = field.name
    values = [None if document is None else document.get(name) for document in documents]
    if set(map(type, values)) <= _as_they_are(field.type):
        try:
            return pa.array(values, field.type)
        except (pa.ArrowInvalid, OverflowError):
            pass  # a number is too large: check each value below
    fit, fitting = fit_for(field.type), []
    for index, value in enumerate(values):
        try:
            fitting.append(None if value is None else fit(value))
        except Misfit as misfit:
            fitting.append(misfit.left)
            left.setdefault(index, {})[name] = value
    return pa.array(fitting, field.type)


def _as_they_are(kind: pa.DataType) -> set[type]:
    """Python types whose values fit, except for their size."""
    if pt.is_string(kind):
        return {str, _NONE}
    if pt.is_integer(kind):
        return {int, _NONE}
    if pt.is_floating(kind):
        return {float, _NONE}
    return {bool, _NONE} if pt.is_boolean(kind) else {_NONE}


def fit_for(kind: pa.DataType) -> Fit:
    """How a JSON value becomes a value of this type."""
    if pt.is_struct(kind):
        return _variant if _is_variant(kind) else _object(kind)
    if pt.is_map(kind):
        return _map(kind)
    if pt.is_list(kind):
        return _list(kind)
    if pt.is_integer(kind):
        return _integer(kind.bit_width)
    if pt.is_decimal(kind):
        return _decimal(kind)
    if pt.is_timestamp(kind):
        return _moment if kind.tz else _local_moment
    for test, fit in _SIMPLE:
        if test(kind):
            return fit
    return _nothing


def _nothing(value: Any) -> NoReturn:
    raise Misfit


def _text(value: Any) -> str:
    """Text, or the JSON of anything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, Decimal) else dumps(_plain(value))


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Misfit


def _integer(bits: int) -> Fit:
    most = 2 ** (bits - 1)

    def fit(value: Any) -> int:
        if type(value) is int and -most <= value < most:
            return value
        raise Misfit

    return fit


def _float(value: Any) -> float:
    if type(value) in (int, float, Decimal):
        try:
            return float(value)
        except OverflowError:
            raise Misfit from None
    if value in _WORDS:
        return float(_WORDS[value])
    raise Misfit


def _decimal(kind: pa.Decimal128Type) -> Fit:
    step = Decimal(1).scaleb(-kind.scale)
    context = Context(prec=kind.precision, rounding=ROUND_HALF_UP)

    def fit(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
            raise Misfit
        try:
            return Decimal(value).quantize(step, context=context)
        except InvalidOperation:
            raise Misfit from None

    return fit


def _binary(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        raise Misfit from None


def _date(value: Any) -> date:
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    try:
        return date(*(int(part or 1) for part in found.groups()))  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        raise Misfit from None


def _moment(value: Any) -> datetime:
    """A timestamp in text, in UTC where it names no zone; or whole seconds since 1970."""
    try:
        if type(value) is int:
            return _EPOCH + timedelta(seconds=value)
        found, zone = _read_moment(value)
        return found.replace(tzinfo=_zone(zone))
    except (ValueError, OverflowError, ZoneInfoNotFoundError):
        raise Misfit from None


def _local_moment(value: Any) -> datetime:
    try:
        return _read_moment(value)[0]
    except ValueError:
        raise Misfit from None


def _read_moment(value: Any) -> tuple[datetime, str | None]:
    found = _MOMENT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(value)
    *whole, fraction, zone = found.groups()
    year, month, day, hour, minute, second = (int(part) if part else None for part in whole)
    micros = int((fraction or "0").ljust(6, "0")[:6])
    return datetime(year or 0, month or 1, day or 1, hour or 0, minute or 0, second or 0, micros), zone  # noqa: DTZ001


def _zone(text: str | None) -> tzinfo:
    if text in (None, "Z", "UTC", "GMT", "UT"):
        return UTC
    assert text is not None
    found = _ZONE.fullmatch(text)
    if found is None:
        return ZoneInfo(text)
    ahead = timedelta(hours=int(found[2]), minutes=int(found[3] or 0))
    return timezone(ahead if found[1] == "+" else -ahead)


def _object(kind: pa.StructType) -> Fit:
    fits = {field.name: fit_for(field.type) for field in kind}

    def fit(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit
        return _whole({name: _part(one, value.get(name)) for name, one in fits.items()})

    return fit


def _map(kind: pa.MapType) -> Fit:
    one = fit_for(kind.item_type)

    def fit(value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise Misfit
        found = _whole({name: _part(one, inner) for name, inner in value.items()}, lambda kept: list(kept.items()))
        return list(found.items())

    return fit


def _list(kind: pa.ListType) -> Fit:
    one = fit_for(kind.value_type)

    def fit(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Misfit
        parts = dict(enumerate(_part(one, inner) for inner in value))
        return list(_whole(parts, lambda kept: list(kept.values())).values())

    return fit


def _part(fit: Fit, value: Any) -> Any:
    try:
        return None if value is None else fit(value)
    except Misfit as misfit:
        return misfit


def _whole(parts: dict[Any, Any], shape: Callable[[dict[Any, Any]], Any] = dict) -> dict[Any, Any]:
    """The parts; ``Misfit`` with those that fit, if one does not."""
    kept = {name: part.left if isinstance(part, Misfit) else part for name, part in parts.items()}
    if any(isinstance(part, Misfit) for part in parts.values()):
        raise Misfit(shape(kept))
    return kept


def _is_variant(kind: pa.StructType) -> bool:
    return kind.num_fields == 2 and b"variant" in (kind.field(1).metadata or {})


def _variant(value: Any) -> dict[str, bytes]:
    from pyspark.sql.types import VariantVal

    try:
        found = VariantVal.parseJson(dumps(_plain(value)))
    except ValueError:
        raise Misfit from None
    return {"value": found.value, "metadata": found.metadata}


_SIMPLE: tuple[tuple[Callable[[pa.DataType], bool], Fit], ...] = (
    (pt.is_string, _text), (pt.is_boolean, _boolean), (pt.is_floating, _float), (pt.is_binary, _binary),
    (pt.is_date, _date),
)  # fmt: skip
