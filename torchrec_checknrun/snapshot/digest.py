"""Digests of encoded state, which tell whether two ranks, or two instants, have the same content.

Dict keys are digested in sorted order, since ranks may have inserted them in different orders; the
stored state keeps its own order. Everything else is digested as encoded, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash
from msgspec import to_builtins

from torchrec_checknrun.dense.param_groups import OWNERS
from torchrec_checknrun.dense.wrappers import OF_EACH_RANK, WRAPPERS
from torchrec_checknrun.format.entries import Entry, StateEntry
from torchrec_checknrun.values.dicts import KIND
from torchrec_checknrun.values.state import Tree, tree_items

_WITH_BYTES = ("b", "x", "n")
"""Letters of nodes that point into the payload."""
_ORDER = "strides"
"""Field of tensors' order in memory, which is no content."""
_MOST_PARTS = 512
_PART_BYTES = 4
_SLICE = 4096
"""Plain elements of a list that form one part: a reader's list may have a million elements."""

Bytes = bytes | memoryview
Read = Callable[[int, int], Bytes]
"""Takes an offset and a length, and returns these bytes of the payload."""


@dataclass(frozen=True)
class Digest:
    """A state object's digest, small enough to be sent to rank 0 with every plan.

    Attributes:
        whole: digest of all content, 16 bytes, but norms of a rank's own gradients in TorchRec's
            wrappers.
        parts: four bytes for each of the first 512 values, which tell where two objects differ.
        alike: digest of the content that all ranks must have alike, 16 bytes: all but the content
            of optimizers' wrappers, which may hold a rank's own values.
    """

    whole: bytes
    parts: bytes
    alike: bytes

    @classmethod
    def of(cls, entry: Entry, pieces: Sequence[Bytes]) -> Digest:
        """Digest a chunk: a state object's tree and payload, any other one's entry and bytes."""
        if not isinstance(entry, StateEntry):
            digest = _plain_digest(entry, pieces)
            return cls(digest, b"", digest)
        read = _reader([memoryview(piece) for piece in pieces])
        parts = list(_parts(entry.tree, read))
        digests = [digest for _, digest in parts]
        first = b"".join(digest[:_PART_BYTES] for digest in digests[:_MOST_PARTS])
        whole = alike = digests
        if OWNERS in tree_items(entry.tree):  # an optimizer's
            whole = [d for path, d in parts if not _is_of_each_rank(path)]
            alike = [d for path, d in parts if path.partition(".")[0] != WRAPPERS]
        return cls(_digest_of(whole), first, _digest_of(alike))

    def differing(self, other: Digest, tree: Tree) -> list[str]:
        """Name the values of this object that another rank's object lacks, among the first 512.

        Args:
            other: the other rank's digest.
            tree: this object's tree.
        """
        theirs = set(_split(other.parts))
        paths = islice(_paths(tree), _MOST_PARTS)
        pairs = zip(paths, _split(self.parts), strict=True)
        return list(dict.fromkeys(path for path, part in pairs if part not in theirs))


def joint_digest(chunks: Iterable[Sequence[Bytes]]) -> str:
    """Digest the joined bytes of chunks, however they are split among the chunks.

    Args:
        chunks: the pieces of each chunk.
    """
    digest = xxhash.xxh3_128()
    for pieces in chunks:
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def _is_of_each_rank(path: str) -> bool:
    return path.startswith(f"{WRAPPERS}.") and path.endswith(f".{OF_EACH_RANK}")


def _digest_of(digests: list[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(digests))


def _plain_digest(entry: Entry, pieces: Sequence[Bytes]) -> bytes:
    digest = xxhash.xxh3_128(_text(to_builtins(entry)).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _split(parts: bytes) -> Iterator[bytes]:
    return (parts[i : i + _PART_BYTES] for i in range(0, len(parts), _PART_BYTES))


def _reader(pieces: list[memoryview]) -> Read:
    """Return a reader of leaves, which have a piece each, or share one (once staged)."""
    if len(pieces) == 1:
        (whole,) = pieces
        return lambda offset, length: whole[offset : offset + length]
    by_offset, end = {}, 0
    for piece in pieces:
        if piece.nbytes:
            by_offset[end] = piece
        end += piece.nbytes
    return lambda offset, length: by_offset[offset] if length else b""


def _parts(tree: Tree, read: Read) -> Iterator[tuple[str, bytes]]:
    """Yield the tree's values, each with the digest of path and content, in the order of paths."""
    for path, text, node in _values(tree, ""):
        digest = xxhash.xxh3_64(f"{path}\0{text}".encode("utf-8", "surrogatepass"))
        if node is not None:
            digest.update(read(*node[next(letter for letter in _WITH_BYTES if letter in node)]))
        yield path, digest.digest()


def _paths(tree: Tree) -> Iterator[str]:
    return (path for path, _, _ in _values(tree, ""))


def _values(node: Tree, path: str) -> Iterator[tuple[str, str, Tree | None]]:
    """Yield every value's path and text, and its node if bytes of the payload belong to it.
    Containers come before their items, so that empty containers count.
    """
    letter = next(iter(node))
    items = node[letter]
    if letter in _WITH_BYTES:
        same = {key: value for key, value in node.items() if key not in (letter, _ORDER)}
        yield path, _text({**same, letter: None}), node
    elif letter == "d":
        yield path, f"d{len(items)}{node.get(KIND, '')}", None
        for key, value in sorted(items, key=lambda item: _order_of(item[0])):
            step = f".{key}" if type(key) is str else f"[{_text(key)}]"
            yield from _values(value, path + step if path else step.removeprefix("."))
    elif isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
        rest = _text({**node, letter: None}) if len(node) > 1 else ""
        yield path, f"{letter}{len(items)}{rest}", None
        if any(_is_inner(item) for item in items):
            for i, item in enumerate(items):
                yield from _values(item, f"{path}[{i}]")
        else:
            for i in range(0, len(items), _SLICE):
                yield f"{path}[{i}]", _text(items[i : i + _SLICE]), None
    else:
        yield path, _text(node), None


def _order_of(key: object) -> tuple[str, str | int]:
    return type(key).__name__, key if isinstance(key, (str, int)) else _text(key)


def _is_inner(node: Tree) -> bool:
    """Return whether other nodes, or bytes of the payload, may belong to a node."""
    value = next(iter(node.values()))
    return isinstance(value, list)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
