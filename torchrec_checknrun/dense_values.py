"""Whatever a checkpoint holds beside table rows, by flat names: for those who have no model.

The names of the state ``model`` are those of its state dict; others begin with the state's name,
and what each rank has of its own with ``<state>.rank<n>``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.blocks import KIND as BLOCK
from torchrec_checknrun.blocks import BlockHeader, block_header
from torchrec_checknrun.chunks import decode_state_chunk
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.read_chunks import StoredChunk, read_chunk

MODEL = "model"
"""The state whose names stand alone."""


def read_dense(root: Folder, chunks: tuple[StoredChunk, ...]) -> dict[str, Any]:
    """All values of a checkpoint that are no table rows.

    Args:
        chunks: of the checkpoint (the head of a chain has all of them).

    Returns:
        By name: tensors (NumPy's arrays as well), and other values as they are. Memory: all of it.

    Raises:
        CorruptCheckpoint: a chunk is not what was written.
        IncompatibleCheckpoint: two values would have the same name.
    """
    found: dict[str, Any] = {}
    pieces: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        entry = chunk.entry
        if entry["kind"] == "state":
            content = decode_state_chunk(entry, read_chunk(root, chunk))
            name = str(entry["name"])
            prefix = name if entry["rank"] is None else f"{name}.rank{entry['rank']}"
            for key, value in _leaves(content, "" if prefix == MODEL else prefix):
                if key in found:
                    raise IncompatibleCheckpoint(
                        f"{chunk.checkpoint} has two values that would be called {key!r}: rename "
                        "one of its state objects"
                    )
                found[key] = value
        elif entry["kind"] == BLOCK:
            header = block_header(entry)
            path = header.path[1:] if header.path[0] == MODEL else header.path
            key = ".".join(map(str, path))
            if key not in pieces:
                pieces[key] = torch.zeros(header.size, dtype=header.dtype)
            _put(pieces[key], header, read_chunk(root, chunk))
    return {**found, **pieces}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Values that hold no others, and empty containers, with the keys that lead there."""
    if isinstance(value, dict) and value:
        items: Any = value.items()
    elif isinstance(value, (list, tuple)) and value:
        items = enumerate(value)
    else:
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.from_numpy(np.array(value))
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _put(whole: torch.Tensor, header: BlockHeader, payload: memoryview) -> None:
    place = header.rectangle
    rows = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(header.dtype)
    target = whole if whole.dim() == 2 else whole.unsqueeze(1)
    target[place.row_start : place.row_stop, place.col_start : place.col_stop] = rows.view(
        place.rows, place.cols
    )
