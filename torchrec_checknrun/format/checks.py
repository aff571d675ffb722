"""Untrusted JSON: check its size, its shape and every value's type before use; seal small records.

A checksum proves that bytes are unchanged, not who wrote them. Manifests, indexes, claims and pins
are therefore parsed under the limits below, which writers observe as well. A sealed record is one
canonical JSON object with its checksum.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from reprlib import repr as shown
from typing import Any

import xxhash

MANIFEST_BYTES = 32 << 20
INDEX_BYTES = 64 << 20
LARGEST = 2**63 - 1
"""The largest number: the range of int64, for readers in other languages."""
VALUES = 1 << 22
"""The most values in one document: each takes some 60 bytes once parsed."""

Check = Callable[[Any], Any]
"""A function that returns a value as used later, or raises a ValueError."""


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


def check_object(value: object, checks: Mapping[str, Check], *optional: str) -> dict[str, Any]:
    """Check that a value is an object with exactly the given fields, and check each field.

    Args:
        optional: names of fields that may be absent.

    Raises:
        ValueError: the value is no such object; names the field.
    """
    if type(value) is not dict:
        raise ValueError(f"{shown(value)} is not an object")
    if unknown := value.keys() - checks.keys():
        raise ValueError(f"unknown fields {shown(sorted(unknown))}")
    if missing := checks.keys() - value.keys() - set(optional):
        raise ValueError(f"fields {sorted(missing)} are missing")
    found = {}
    for name, item in value.items():
        try:
            found[name] = checks[name](item)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def as_count(value: object) -> int:
    """Check a count or a position.

    Raises:
        ValueError: the value is not an integer from 0 to ``LARGEST``.
    """
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{shown(value)} is not a count")
    return value


def as_number(value: object) -> float:
    """Check a finite number; an integer stays an integer."""
    if type(value) is int and abs(value) <= LARGEST:
        return value
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{shown(value)} is not a finite number")
    return value


def as_measure(value: object) -> float:
    """Check a finite number that is not negative."""
    number = as_number(value)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def as_text(value: object) -> str:
    """Check a string of at most 4,096 characters that UTF-8 can encode (no lone surrogates)."""
    if type(value) is not str or len(value) > 4096:
        raise ValueError(f"{shown(value)} is not text, or too long")
    value.encode()
    return value


def as_flag(value: object) -> bool:
    """Check a boolean."""
    if type(value) is not bool:
        raise ValueError(f"{shown(value)} is neither true nor false")
    return value


def as_options(value: object) -> dict[str, Any]:
    """Check a codec's parameters: names with numbers, texts, flags or None."""
    if type(value) is not dict or len(value) > 64:
        raise ValueError(f"{shown(value)} is not a small object")
    for name, item in value.items():
        as_text(name)
        if item is not None and type(item) not in (bool, str):
            as_number(item)
        elif type(item) is str:
            as_text(item)
    return value


def optional(check: Check) -> Check:
    """Extend a check to accept None."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check) -> Check:
    """Make a check of lists from a check of their items."""

    def as_list(value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{shown(value)} is not a list")
        return [check(item) for item in value]

    return as_list


def dict_of(check: Check) -> Check:
    """Make a check of objects from a check of their values."""

    def as_dict(value: object) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError(f"{shown(value)} is not an object")
        return {as_text(name): check(item) for name, item in value.items()}

    return as_dict


def canonical(content: dict[str, Any]) -> bytes:
    """Encode an object as JSON with sorted keys and no spaces, UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum(content: dict[str, Any]) -> str:
    """Return the checksum of an object's canonical bytes: xxh3, 128 bit, hex."""
    return xxhash.xxh3_128_hexdigest(canonical(content))


def seal(kind: str, content: dict[str, Any]) -> bytes:
    """Return a record's file content: the checksum and the content under its kind."""
    return canonical({"checksum": checksum(content), kind: content})


def unseal(data: bytes, kind: str, most: int) -> dict[str, Any]:
    """Return the content of a record's file.

    Args:
        most: the largest allowed size, in bytes.

    Raises:
        ValueError: the file is damaged, or not a record of that kind.
    """
    document = parse_json(data, most)
    if type(document) is not dict or document.keys() != {"checksum", kind}:
        raise ValueError(f"not a checksummed {kind}")
    content = document[kind]
    try:
        whole = type(content) is dict and seal(kind, content) == data
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not whole:
        raise ValueError("the checksum or the encoding doesn't match the content")
    return content


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
