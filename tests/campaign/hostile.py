"""Feed hostile manifests, indexes, payloads, claims, pins and state trees to all readers.

Allowed: an input is read, or refused by a documented error, in bounded memory and time. No input
may cause anything to be unpickled, run, or written outside of the given folder.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch

from tests.campaign.guard import Guard
from tests.campaign.mutations import Mutator
from tests.campaign.outcome import Outcome
from tests.unit.chains import TABLE, make_shards, restore
from tests.unit.entries import decode_rows, decode_stored
from tests.unit.forgery import ROWS, Forged, example, load, seal
from tests.unit.fuzz import bounded_memory
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import CheckNRunError, StorageFailed
from torchrec_checknrun.format import reader as read_chunks
from torchrec_checknrun.format.manifest import RankFile, parse_manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import parse_index
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, pin
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tools.export import export_dcp, export_safetensors
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.values.state import encode_state

CPU_SECONDS = 5.0
"""CPU time limit of an input."""
_KINDS = {
    "chain": 10,
    "bytes": 8,
    "control": 9,
    "state": 25,
    "rows": 30,
    "index": 8,
    "manifest": 12,
}
"""Kinds of inputs, each with its weight in the draw."""
_numbers = itertools.count()


def run(seed: int, first: int, count: int, folder: Path, prepared: Path | None = None) -> Outcome:
    """Try inputs in this process, which must run nothing else.

    Args:
        prepared: a folder with the root of a real run in it.
    """
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    bench = _Bench(folder, prepared)
    outcome = Outcome()
    bench.warm_up()
    with (
        mock.patch.object(read_chunks, "VISIBLE_SECONDS", 0.0),
        mock.patch.dict(os.environ, {"CHECKNRUN_RETRY_SECONDS": "0"}),
        bounded_memory(),
    ):
        for number in range(first, first + count):
            bench.try_one(random.Random(f"{seed}/{number}"), number, outcome)
    return outcome


class _Bench:
    """The valid chains to change, and all readers."""

    def __init__(self, folder: Path, prepared: Path | None) -> None:
        self._folder = folder
        chains = [example()]
        controls: list[tuple[str, bytes]] = [("writers/epoch-00000001.json", b"{}")]
        if prepared is not None:
            root = Folder(prepared / "root")
            chains.append(load(root))
            for path in sorted(prepared.glob("root/writers/*")):
                controls.append((f"writers/{path.name}", path.read_bytes()))
            for path in sorted(prepared.glob("root/*/pinned")):
                controls.append((f"{path.parent.name}/pinned", path.read_bytes() or b"{}"))
        self._chains, self._controls = chains, controls
        self._states = [
            (entry, bytes(file.payload))
            for chain in chains
            for one in chain
            for file in one.files.values()
            for entry in file.index["chunks"]
        ]
        self._trees = [encode_state(value, "s") for value in _values()]
        self._sound = [self._seal_sound(chain) for chain in chains]
        self._guard = Guard(str(folder))
        tempfile.tempdir = str(folder)
        # Change the directory: an audit event of a file opened relative to a directory's descriptor
        # has the bare name alone.
        os.chdir(folder)

    def _seal_sound(self, chain: list[Forged]) -> tuple[str, dict[str, bytes]]:
        root = Folder(f"memory://hostile/sound/{next(_numbers)}")
        root.create()
        head = seal(root, copy.deepcopy(chain))
        fs, path = fsspec.core.url_to_fs(root.url)
        found = {name[len(path) + 1 :]: fs.cat_file(name) for name in fs.find(path)}
        return head, found

    def warm_up(self) -> None:
        """Read a valid chain in every way: modules are loaded at first use."""
        for chain in self._chains:
            root = self._root()
            head = seal(root, copy.deepcopy(chain))
            for read, _ in _READERS.values():
                read(root, head, self._folder)
            self._forget(root)

    def try_one(self, rng: random.Random, number: int, outcome: Outcome) -> None:
        """Make an input and read it."""
        kind = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
        began = time.process_time()
        self._guard.found.clear()
        self._guard.on = True
        readers: list[str] = []
        try:
            getattr(self, f"_{kind}")(rng, readers)
            outcome.counts["read"] += 1
        except (CheckNRunError, StorageFailed, FileNotFoundError) as error:
            outcome.counts[f"refused: {type(error).__name__}"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome.fail(number, "error", f"{kind}, {readers[-1:]}: {error!r:.500}{_where(error)}")
        finally:
            self._guard.on = False
        seconds = time.process_time() - began
        outcome.counts["inputs"] += 1
        outcome.counts[f"inputs: {kind}"] += 1
        for reader in readers:
            outcome.counts[f"read by: {reader}"] += 1
        if seconds > CPU_SECONDS:
            outcome.fail(number, "hung", f"{kind}, {readers}: it took {seconds:.1f} s")
        for what in self._guard.found:
            outcome.fail(number, "error", f"{kind}, {readers}: it did: {what}")

    def _chain(self, rng: random.Random, readers: list[str]) -> None:
        """Try a chain with changed documents and matching checksums."""
        chain = copy.deepcopy(rng.choice(self._chains))
        Mutator(rng).chain(chain)
        root = self._root()
        try:
            self._read(root, seal(root, chain), rng, readers)
        finally:
            self._forget(root)

    def _bytes(self, rng: random.Random, readers: list[str]) -> None:
        """Try a root that has one file with changed bytes."""
        head, files = rng.choice(self._sound)
        name = rng.choice(sorted(files))
        self._read_files(head, {**files, name: Mutator(rng).data(files[name])}, rng, readers)

    def _control(self, rng: random.Random, readers: list[str]) -> None:
        """Try a root with a changed control record."""
        head, files = rng.choice(self._sound)
        name, data = rng.choice(self._controls)
        if name.endswith("pinned"):
            name = f"{head}/pinned"
        self._read_files(head, {**files, name: Mutator(rng).control(data)}, rng, readers)

    def _state(self, rng: random.Random, readers: list[str]) -> None:
        """Try a state with a changed tree or content."""
        tree, pieces = rng.choice(self._trees)
        payload, mutator = b"".join(bytes(piece) for piece in pieces), Mutator(rng)
        entry: dict[str, Any] = {"kind": "state", "name": "s", "rank": None}
        entry["tree"] = copy.deepcopy(tree)
        if rng.random() < 0.9:
            mutator.tree(entry)
        else:
            payload = mutator.data(payload)
        readers.append("decode_state")
        file = RankFile("rank-00000.bin", len(payload) + 100, len(payload), 60, "0" * 16, 1)
        entry |= {"offset": 0, "length": len(payload), "checksum": "0" * 16}
        parse_index(_index([entry]), file, "here")
        decode_stored(entry, payload)

    def _rows(self, rng: random.Random, readers: list[str]) -> None:
        """Try a chunk of rows with a changed entry or payload."""
        entry, data = rng.choice(self._states)
        if entry["kind"] != "rows":
            return self._state(rng, readers)
        payload = data[entry["offset"] : entry["offset"] + entry["length"]]
        entry, mutator = copy.deepcopy(entry), Mutator(rng)
        if rng.random() < 0.6:
            mutator.tree(entry)
        else:
            payload = mutator.data(payload)
        readers.append("decode_rows")
        decode_rows(entry, payload)

    def _index(self, rng: random.Random, readers: list[str]) -> None:
        """Try a changed index."""
        chain = rng.choice(self._chains)
        file = rng.choice(list(rng.choice(chain).files.values()))
        index, mutator = copy.deepcopy(file.index), Mutator(rng)
        data = _index(index["chunks"])
        if rng.random() < 0.7:
            mutator.tree(index)
            data = _dumps(index)
        else:
            data = mutator.data(data)
        chunks = index.get("chunks") if isinstance(index, dict) else None
        count = len(chunks) if isinstance(chunks, list) else 1
        readers.append("parse_index")
        end = len(file.payload)
        parse_index(data, RankFile("rank-00000.bin", end + 99, end, 59, "0" * 16, count), "here")

    def _manifest(self, rng: random.Random, readers: list[str]) -> None:
        """Try a changed manifest."""
        _, files = rng.choice(self._sound)
        name = rng.choice([name for name in sorted(files) if name.endswith(MANIFEST_NAME)])
        readers.append("parse_manifest")
        parse_manifest(Mutator(rng).control(files[name]), "here")

    def _read_files(
        self, head: str, files: dict[str, bytes], rng: random.Random, readers: list[str]
    ) -> None:
        root = self._root()
        fs, path = fsspec.core.url_to_fs(root.url)
        for name, data in files.items():
            fs.pipe_file(f"{path}/{name}", data)
        try:
            self._read(root, head, rng, readers)
        finally:
            self._forget(root)

    def _root(self) -> Folder:
        root = Folder(f"memory://hostile/{os.getpid()}/{next(_numbers)}")
        root.create()
        return root

    def _forget(self, root: Folder) -> None:
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(root.url, recursive=True)

    def _read(self, root: Folder, head: str, rng: random.Random, readers: list[str]) -> None:
        """Read a root with one or two of the readers."""
        weights = [weight for _, weight in _READERS.values()]
        chosen = rng.choices(list(_READERS), weights=weights, k=rng.choice([1, 2]))
        for name in chosen:
            readers.append(name)
            _READERS[name][0](root, head, self._folder)


def _index(chunks: list[Any]) -> bytes:
    return _dumps({"rank": 0, "chunks": chunks})


def _dumps(document: Any) -> bytes:
    import json

    return json.dumps(document, separators=(",", ":")).encode()


def _restore(root: Folder, head: str, folder: Path) -> None:
    table = resolve(root, head).head.tables.get(TABLE)
    if table is not None and (table.rows, table.dim) == (ROWS, 8):
        places = [Rectangle(0, 33, 0, 4), Rectangle(33, ROWS, 0, 4), Rectangle(0, ROWS, 4, 8)]
        restore(root, head, make_shards(ROWS, places))


def _cat(root: Folder, head: str, folder: Path) -> None:
    content = read_content(root, resolve(root, head))
    for table, totals in content.chain.head.tables.items():
        reader = TableReader(content, table, ChunkCache(root))
        reader.rows([row for row in (0, 33, ROWS - 1) if row < totals.rows])


def _export(save: Callable[..., object]) -> Callable[[Folder, str, Path], object]:
    def export(root: Folder, head: str, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            save(root, resolve(root, head), made)

    return export


_Reader = Callable[[Folder, str, Path], object]
_READERS: dict[str, tuple[_Reader, int]] = {
    "newest": (lambda root, head, folder: newest(root), 6),
    "verify": (lambda root, head, folder: verify(root.url), 6),
    "ls": (lambda root, head, folder: inventory(root), 6),
    "prune": (lambda root, head, folder: prune(root, Retention(1, 1.0), dry_run=True), 4),
    "pin": (lambda root, head, folder: pin(root, head), 2),
    "restore": (_restore, 5),
    "content": (lambda root, head, folder: read_content(root, resolve(root, head)), 5),
    "cat": (_cat, 3),
    "diff": (lambda root, head, folder: compare(root.url, committed(root)[-1], head), 2),
    "export": (_export(export_safetensors), 2),
    "export for DCP": (_export(export_dcp), 1),
    "compact": (lambda root, head, folder: compact(root.url, head), 1),
}
"""Readers of a root by name, each with its weight in the draw."""


def _values() -> list[Any]:
    """Return states with every type that a state may hold."""
    return [
        {"a": 1, "b": [1.5, None, True, "text", b"bytes", (1, 2)], "c": {"d": {}}},
        {"t": torch.arange(6.0).reshape(2, 3), "u": torch.zeros(0, dtype=torch.int64)},
        {"n": torch.arange(4).numpy(), "x": 2**62, 3: "key", "e": torch.ones((), dtype=torch.bool)},
        [{"w": torch.ones(3, dtype=torch.bfloat16)} for _ in range(3)],
    ]


def _where(error: BaseException) -> str:
    """Return the last lines of an error's traceback."""
    import traceback

    return "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
