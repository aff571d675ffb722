"""Untrusted JSON: check its size, its shape and every value's type before use; seal small records.

A checksum proves that bytes are unchanged, not who wrote them. Manifests, indexes, claims and pins
are therefore parsed under the limits below, which writers observe as well. A sealed record is one
canonical JSON object with its checksum.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Set
from datetime import datetime
from reprlib import repr as shown
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Struct

from torchrec_checknrun.values.limits import LARGEST

MANIFEST_BYTES = 32 << 20
INDEX_BYTES = 64 << 20
VALUES = 1 << 22
"""The most values in one document: each takes some 60 bytes once parsed."""

_MOST_TOLD = 400
"""Characters of an error about untrusted content."""

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
_NONE: frozenset[str] = frozenset()

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""A count or a position."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Number = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)] | Finite
"""A finite number; an integer stays an integer."""
Measure = Count | Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""A finite number that is not negative."""
Text = Annotated[str, Meta(max_length=4096)]
"""A string. Without a pattern: msgspec 0.22 frees a pattern too early where a string of that
pattern and a list are the alternatives of one value.
"""
Options = Annotated[dict[Text, Number | Text | bool | None], Meta(max_length=64)]
"""A codec's parameters."""


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of typed content of untrusted JSON."""


def parse_json(data: bytes | bytearray, most: int) -> Any:
    """Parse a UTF-8 document without duplicate keys, NaN and infinities.

    Args:
        most: the largest allowed size, in bytes.

    Raises:
        ValueError: the document is malformed, or exceeds a limit.
    """
    require_limits(data, most)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def require_limits(data: bytes | bytearray, most: int) -> None:
    """Refuse a document that readers would refuse to parse.

    Raises:
        ValueError: the document has more bytes or values than allowed.
    """
    if len(data) > most:
        raise ValueError(f"{len(data)} bytes, more than the {most} that are read")
    values = sum(data.count(mark) for mark in b"[{,")
    if values > VALUES:
        raise ValueError(f"{values} values, more than the {VALUES} that are read")


def typed(content: object, kind: type[T]) -> T:
    """Convert parsed JSON to a type, with every value of the exact type and within its bounds.

    Raises:
        ValueError: names the expectation and the path of the value.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        text = "".join(letter if letter.isprintable() else "?" for letter in str(error))
        if len(text) > _MOST_TOLD:  # of an untrusted name; the path comes last
            text = f"{text[: _MOST_TOLD // 2]} … {text[-_MOST_TOLD // 2 :]}"
        raise ValueError(text) from None


def require_fields(
    content: object, kind: type[Struct], elsewhere: Set[str] = _NONE, optional: Set[str] = _NONE
) -> None:
    """Refuse an object with other fields than a struct's, or without one of them: the defaults of
    fields are for content that is made in memory.

    Args:
        elsewhere: names of fields that no file holds.
        optional: names of fields that a file may lack.

    Raises:
        ValueError: names the fields.
    """
    if type(content) is not dict:
        raise ValueError(f"{shown(content)} is not an object")
    wanted = set(kind.__struct_fields__) - elsewhere
    if unknown := content.keys() - wanted:
        raise ValueError(f"unknown fields {shown(sorted(unknown))}")
    if missing := wanted - optional - content.keys():
        raise ValueError(f"fields {sorted(missing)} are missing")


def canonical(content: dict[str, Any]) -> bytes:
    """Encode an object as JSON with sorted keys and no spaces, UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum(content: dict[str, Any]) -> str:
    """Return the checksum of an object's canonical bytes: xxh3, 128 bit, hex."""
    return xxhash.xxh3_128_hexdigest(canonical(content))


def seal(kind: str, content: dict[str, Any]) -> bytes:
    """Return a record's file content: the checksum and the content under its kind."""
    return canonical({"checksum": checksum(content), kind: content})


def unseal(data: bytes, kind: type[S], most: int, elsewhere: Set[str] = _NONE) -> S:
    """Return the content of a record's file.

    Args:
        kind: a struct, whose name the file has as well.
        most: the largest allowed size, in bytes.
        elsewhere: names of the struct's fields that no file holds.

    Raises:
        ValueError: the file is damaged, or not a record of that kind.
    """
    document, name = parse_json(data, most), kind.__name__.lower()
    if type(document) is not dict or document.keys() != {"checksum", name}:
        raise ValueError(f"not a checksummed {name}")
    content = document[name]
    try:
        whole = type(content) is dict and seal(name, content) == data
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not whole:
        raise ValueError("the checksum or the encoding doesn't match the content")
    require_fields(content, kind, elsewhere)
    return typed(content, kind)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {shown(twice)} appears twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{shown(text)} is too large a number")
    return number


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def require_time(name: str, text: str) -> None:
    """Refuse anything but ISO 8601 with a time zone: retention counts hours by it.

    Raises:
        ValueError: the text is something else.
    """
    try:
        zone = datetime.fromisoformat(text).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise ValueError(f"{name}: {shown(text)} is not ISO 8601 with a time zone")
