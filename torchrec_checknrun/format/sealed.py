"""Control records: small JSON files under a checksum, which decide what counts and what is deleted.

A record is ``{"checksum": …, kind: {…}}``, written canonically. Any other byte is damage: a record
is read back only if writing its content again gives the very same file.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from torchrec_checknrun.format.checks import parse_json


def canonical(content: dict[str, Any]) -> bytes:
    """Encode an object as JSON with sorted keys and no spaces, UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum(content: dict[str, Any]) -> str:
    """Return the checksum of an object's canonical bytes: xxh3, 128 bit, hex."""
    return xxhash.xxh3_128_hexdigest(canonical(content))


def seal(kind: str, content: dict[str, Any]) -> bytes:
    """Return a record's file."""
    return canonical({"checksum": checksum(content), kind: content})


def unseal(data: bytes, kind: str, most: int) -> dict[str, Any]:
    """Return the content of a record's file.

    Args:
        most: bytes that the file may have.

    Raises:
        ValueError: the file is damaged, or no record of that kind.
    """
    document = parse_json(data, most)
    if type(document) is not dict or document.keys() != {"checksum", kind}:
        raise ValueError(f"it is no checksummed {kind}")
    content = document[kind]
    try:
        whole = type(content) is dict and seal(kind, content) == data
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not whole:
        raise ValueError("its checksum, or the way it is written, doesn't fit its content")
    return content
