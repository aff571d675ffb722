"""Change valid documents and bytes at random, from a seed, to make hostile inputs."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import xxhash

from tests.unit.forgery import Forged
from tests.unit.fuzz import NUMBERS, TEXTS, apply

_FLOATS = [0.5, -1.0, 1e308, 5e-324]
_DTYPES = ["float32", "int64", "uint8", "bfloat16", "bool", "complex64", "<U9", "object", "O"]
_KEYS = ["x", "n", "d", "l", "t", "s", "bytes", "raw", "shape", "dtype", "offset", "kind"]


class Mutator:
    """A source of random changes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def value(self, depth: int = 2) -> Any:
        """Return a value that may be valid anywhere but in its place."""
        rng = self._rng
        what = rng.randrange(11 if depth else 8)
        if what < 3:
            return rng.choice(NUMBERS)
        if what < 5:
            return rng.choice([*TEXTS, *_DTYPES])
        if what == 5:
            return rng.choice([None, True, False, *_FLOATS])
        if what == 6:
            return rng.randint(-3, 300)
        if what == 7:
            return "a" * rng.choice([1, 300, 70_000])
        if what == 8:
            return [self.value(depth - 1) for _ in range(rng.randrange(4))]
        if what == 9:
            return {rng.choice(_KEYS): self.value(depth - 1) for _ in range(rng.randrange(3))}
        nested: Any = []
        for _ in range(rng.choice([3, 60, 200])):
            nested = [nested]
        return nested

    def tree(self, tree: Any) -> None:
        """Change a document in one place."""
        rng = self._rng
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            path: list[Any] = []
            node = tree
            while isinstance(node, (dict, list)) and node and (not path or rng.random() < 0.8):
                keys = sorted(node, key=str) if isinstance(node, dict) else range(len(node))
                path.append(rng.choice(list(keys)))
                node = node[path[-1]]
            if not path:
                return
            what = rng.choice(["set", "set", "near", "near", "drop", "twice", "add"])
            value = self.near(node) if what == "near" else self.value()
            apply(tree, (path, "set" if what == "near" else what, value))

    def near(self, value: Any) -> Any:
        """Return a value close to another one, as an attacker would choose."""
        rng = self._rng
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return rng.choice([value + 1, value - 1, -value, value * 2, value << 32, value ^ 1])
        if isinstance(value, float):
            return rng.choice([-value, value * 1e300, value + 1])
        if isinstance(value, str) and value:
            place = rng.randrange(len(value))
            letter = rng.choice("0a/.é\0")
            return value[:place] + letter + value[place + rng.randrange(2) :]
        if isinstance(value, list):
            return rng.choice([value[::-1], value * 2, value[1:], [value]])
        return self.value()

    def data(self, data: bytes | bytearray) -> bytes:
        """Return changed bytes."""
        rng, changed = self._rng, bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5])):
            place = rng.randrange(len(changed) + 1)
            what = rng.randrange(7)
            if what == 0 and place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            elif what == 1 and place < len(changed):
                changed[place] = rng.choice([0, 255, 34, 91, 123, 45, 57])
            elif what == 2:
                del changed[place : place + rng.randint(1, 40)]
            elif what == 3:
                changed[place:place] = rng.randbytes(rng.randint(1, 20))
            elif what == 4:
                other = rng.randrange(len(changed) + 1)
                changed[place:place] = changed[other : other + rng.randint(1, 60)]
            elif what == 5:
                changed[place:place] = rng.choice([b"[", b'{"a":', b"9", b"\\"]) * 20_000
            else:
                del changed[place:]
        return bytes(changed)

    def chain(self, chain: list[Forged]) -> None:
        """Change a chain in one to three places, and make its checksums match."""
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            self._part(self._rng.choice(chain))

    def _part(self, checkpoint: Forged) -> None:
        rng = self._rng
        file = checkpoint.files[rng.choice(sorted(checkpoint.files))]
        what = rng.randrange(8)
        chunks = file.index.get("chunks") if isinstance(file.index, dict) else None
        if what < 3 and isinstance(chunks, list) and chunks:
            self.tree(rng.choice(chunks))
        elif what == 3:
            self.tree(file.index)
        elif what < 6:
            changed = copy.deepcopy(checkpoint.manifest)
            self.tree(changed)

            def put(document: dict[str, Any]) -> None:
                # Apply the change to the record; elsewhere update only what must match.
                for key in [*document]:
                    if key not in changed:
                        del document[key]
                    elif changed[key] != checkpoint.manifest.get(key):
                        document[key] = changed[key]
                document.update({k: v for k, v in changed.items() if k not in document})

            checkpoint.change_manifest(put)
        elif what == 6:
            file.payload = bytearray(self.data(file.payload))
        else:
            file.raw_index = self.data(json.dumps(file.index).encode())

    def control(self, data: bytes) -> bytes:
        """Return a changed control record; its checksum, if any, matches."""
        document = json.loads(data)
        kinds = [key for key in document if key != "checksum"]
        sealed = "checksum" in document and len(kinds) == 1
        if self._rng.random() < 0.2:
            return self.data(data)
        self.tree(document[kinds[0]] if sealed else document)
        if sealed:
            content = json.dumps(
                document[kinds[0]], sort_keys=True, separators=(",", ":"), ensure_ascii=False
            )
            encoded = content.encode("utf-8", "surrogatepass")
            document["checksum"] = xxhash.xxh3_128_hexdigest(encoded)
        return json.dumps(
            document, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode("utf-8", "surrogatepass")
