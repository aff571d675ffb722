"""Change small valid chains anywhere; check that every reader restores or refuses them.

python -m tests.unit.fuzz --seconds 600 --json fuzz.json
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.unit.chains import new_root, one_thread
from tests.unit.forgery import Forged, attack, example, seal

EXTRA_BYTES = 1 << 30
"""Address space that reading any input may add."""
EACH_SECONDS = 20
"""More seconds than any input takes on a busy machine."""

NUMBERS = [-1, 0, 1, 2, 7, 60, 61, 255, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**300]
TEXTS = ["", "x", "rows", "state", "exact", "fp32", "gaps_zstd", "range", "../x", "/", "\x00", "é"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from([0.5, -1.0, 1e308, 5e-324]),
    st.sampled_from(TEXTS),
    st.integers(-3, 300),
)
JUNK = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["x", "n", "d", "l", "bytes", "raw", "shape"]), SCALARS),
    st.builds(lambda: [[[[[[]]]]], [[]]]),
)


@dataclass
class Counts:
    """The number of tried inputs, by outcome.

    Attributes:
        refused: by at least one reader; no change in the others matters.
        slowest_seconds: the longest time of an input.
    """

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_seconds: float = 0.0


@st.composite
def forged(draw: st.DrawFn, original: list[Forged]) -> list[Forged]:
    """Draw a chain with one to three changes."""
    chain = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        checkpoint = draw(st.sampled_from(chain))
        file = checkpoint.files[draw(st.sampled_from(sorted(checkpoint.files)))]
        what = draw(
            st.sampled_from(["index", "entry", "manifest", "payload", "bytes", "manifest bytes"])
        )
        if what == "index":
            change_tree(draw, file.index)
        elif what == "entry" and isinstance(chunks := file.index.get("chunks"), list) and chunks:
            change_tree(draw, draw(st.sampled_from(chunks)))
        elif what == "manifest":
            document = copy.deepcopy(checkpoint.manifest)
            places = changes(draw, document)
            checkpoint.change_manifest(partial(apply, change=places))
        elif what == "payload":
            change_bytes(draw, file.payload)
        elif what == "bytes":
            data = bytearray(json.dumps(file.index).encode())
            change_bytes(draw, data)
            file.raw_index = bytes(data)
        else:
            place, byte = draw(st.integers(0, 2000)), draw(st.integers(0, 255))
            checkpoint.raw_manifest = lambda data, p=place, b=byte: (
                data[: p % len(data)] + bytes([b]) + data[p % len(data) + 1 :]
            )
    return chain


Change = tuple[list[Any], str, Any]
"""A change: place, operation and value."""


def changes(draw: st.DrawFn, tree: Any) -> Change:
    """Draw a change somewhere in a tree."""
    path: list[Any] = []
    node = tree
    while isinstance(node, (dict, list)) and node and (not path or draw(st.integers(0, 4))):
        keys = sorted(node, key=str) if isinstance(node, dict) else range(len(node))
        path.append(draw(st.sampled_from(list(keys))))
        node = node[path[-1]]
    return path, draw(st.sampled_from(["set", "set", "drop", "twice", "add"])), draw(JUNK)


def apply(tree: Any, change: Change) -> None:
    """Apply a change to a tree; leave a tree without the place as it is."""
    path, what, value = change
    node, value = tree, copy.deepcopy(value)  # an earlier change may be within the value
    for key in path[:-1]:
        if not (isinstance(node, dict) and key in node) and not (
            isinstance(node, list) and isinstance(key, int) and key < len(node)
        ):
            return
        node = node[key]
    key = path[-1] if path else None
    if isinstance(node, dict) and key in node:
        if what == "drop":
            del node[key]
        else:
            node[key if what != "add" else "added"] = value
    elif isinstance(node, list) and isinstance(key, int) and key < len(node):
        if what == "drop":
            del node[key]
        elif what == "twice":
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = value


def change_tree(draw: st.DrawFn, tree: Any) -> None:
    if isinstance(tree, (dict, list)) and tree:
        apply(tree, changes(draw, tree))


def change_bytes(draw: st.DrawFn, data: bytearray) -> None:
    if not data:
        return
    place = draw(st.integers(0, len(data) - 1))
    what = draw(st.sampled_from(["flip", "cut", "insert"]))
    if what == "flip":
        data[place] ^= draw(st.integers(1, 255))
    elif what == "cut":
        del data[place : place + draw(st.integers(1, 40))]
    else:
        data[place:place] = draw(st.binary(min_size=1, max_size=20))


def campaign(
    examples: int, number: int, original: list[Forged], stop: Callable[[], bool] = lambda: False
) -> Counts:
    """Try a number of chains.

    Args:
        number: seeds the choice.
        stop: asked before each chain; returns True to skip the rest.

    Raises:
        Exception: a chain was neither read nor refused; hypothesis prints the smallest such change.
    """
    counts = Counts()
    began = time.perf_counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(forged(original))
    def try_one(chain: list[Forged]) -> None:
        if stop():
            return
        root, start = new_root(), time.perf_counter()
        try:
            refused = attack(root, seal(root, chain))
        finally:
            fsspec.filesystem("memory").rm(root.url, recursive=True)
        seconds = time.perf_counter() - start
        assert seconds < EACH_SECONDS, f"it took {seconds:.0f} s: {refused}"
        counts.inputs += 1
        counts.refused += bool(refused)
        counts.slowest_seconds = max(counts.slowest_seconds, seconds)

    with one_thread():
        try_one()
    counts.seconds = time.perf_counter() - began
    return counts


def run(seconds: float, first: int = 0) -> Counts:
    """Try chains for a number of seconds, in bounded memory."""
    original, total, end = example(), Counts(), time.monotonic() + seconds
    campaign(20, first, original)  # load and compile at first use
    with bounded_memory():
        while time.monotonic() < end:
            first += 1
            part = campaign(500, first, original, lambda: time.monotonic() >= end)
            total.inputs += part.inputs
            total.refused += part.refused
            total.seconds += part.seconds
            total.slowest_seconds = max(total.slowest_seconds, part.slowest_seconds)
    return total


class bounded_memory:
    """A limit of this process's address space, ``EXTRA_BYTES`` beyond the current size."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = run(arguments.seconds, arguments.seed)
    print(
        f"{counts.inputs} hostile chains in {counts.seconds:.0f} s: {counts.refused} refused, "
        f"{counts.inputs - counts.refused} read as they are; the slowest took "
        f"{counts.slowest_seconds:.2f} s, none more than {EXTRA_BYTES >> 20} MB"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(counts), indent=2) + "\n")


if __name__ == "__main__":
    main()
