"""Look into a store: find when a checkpoint is there, and split its bytes by content.

    python -m recipes.benchmarks.side_by_side.store FOLDER

waits for checkpoints: a process that knows only the folder prints the time at which each was first
listed (seconds of the system's monotonic clock), until the input is closed. The module imports only
the standard library.
"""

from __future__ import annotations

import json
import pickle
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MARKERS = ("manifest.json", ".metadata", ".snapshot_metadata", "dense.pt")
"""The file that each system writes last."""
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Bytes:
    """A checkpoint's bytes, all from listing its folder.

    Attributes:
        manifest: manifest, indexes and everything that is neither of the others.
    """

    tables: int
    optimizer: int
    dense: int
    manifest: int

    @property
    def rows(self) -> int:
        """Return the bytes of table rows: weights, ids and optimizer state."""
        return self.tables + self.optimizer

    @property
    def total(self) -> int:
        return self.rows + self.dense + self.manifest

    def to_json(self) -> dict[str, int]:
        """Return all fields and the sums."""
        return {**asdict(self), "rows": self.rows, "total": self.total}


def committed(root: Path) -> list[Path]:
    """List the checkpoints of a store, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if any((p / name).exists() for name in MARKERS))


def superseded(root: Path) -> list[Path]:
    """List the checkpoints that the newest one doesn't need, to delete them."""
    found = committed(root)
    if not found or any(found[-1].glob("tables-*.pt")):  # such checkpoints build upon each other
        return []
    needed: str | None = found[-1].name
    while needed is not None:
        found = [path for path in found if path.name != needed]
        path = root / needed / "manifest.json"
        parent = json.loads(path.read_bytes())["manifest"]["parent"] if path.exists() else None
        needed = parent["id"] if parent else None
    return found


def listed(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def split(folder: Path) -> Bytes:
    """Split a checkpoint's bytes by content; the sum is that of ``listed``."""
    tables, optimizer, dense = _parts(folder)
    return Bytes(tables, optimizer, dense, listed(folder) - tables - optimizer - dense)


def _parts(folder: Path) -> tuple[int, int, int]:
    """Return the bytes of table rows and ids, of their optimizer state, and of everything dense."""
    if (folder / "manifest.json").exists():
        manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
        of_tables = manifest["tables"].values()
        tables = sum(table["weight_bytes"] + table["ids_bytes"] for table in of_tables)
        return tables, sum(t["optimizer_bytes"] for t in of_tables), manifest["dense_bytes"]
    if (folder / "dense.pt").exists():
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        tables = sum(size for name, size in sizes.items() if name.startswith("tables-"))
        states = sum(size for name, size in sizes.items() if name.startswith("optimizer-"))
        return tables, states, sizes["dense.pt"]
    named = list(_items(folder))
    of_table = [(name, size) for name, size in named if ".embedding_bags." in name]
    states = sum(size for name, size in of_table if ".momentum1" in name)
    tables = sum(size for _, size in of_table) - states
    return tables, states, sum(size for _, size in named) - tables - states


def _items(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of everything that DCP or torchsnapshot has stored."""
    if (folder / ".metadata").exists():
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for index, place in metadata.storage_data.items():
            yield index.fqn, place.length
        return
    # The file is YAML, and JSON as well.
    entries = json.loads((folder / ".snapshot_metadata").read_text())["manifest"]
    for name, entry in entries.items():
        for shard in entry.get("shards") or entry.get("chunks") or [{"tensor": entry}]:
            tensor = shard["tensor"]
            if tensor.get("byte_range"):
                start, stop = tensor["byte_range"]
                yield name, stop - start
            elif tensor.get("location"):
                yield name, (folder / tensor["location"]).stat().st_size


def _watch(root: Path) -> None:
    seen: dict[str, float] = {}
    asked = False
    while not asked:
        asked = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
        for path in committed(root):
            if path.name not in seen:
                seen[path.name] = time.monotonic()
    print(json.dumps(seen))


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
