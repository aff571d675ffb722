"""Export a checkpoint to a plain DCP checkpoint or to safetensors, for use without this package.

Tables are restored into scratch files that are mapped into memory, and written from there by the
formats' own libraries: however large a table is, the operating system decides how much of it stays
in memory.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from torchrec_checknrun.errors import CheckpointExists, IncompatibleCheckpoint
from torchrec_checknrun.format.names import is_plain_name
from torchrec_checknrun.format.reader import Read
from torchrec_checknrun.restore.chunks import ChainContent, read_content
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import storage_failed
from torchrec_checknrun.tools.dense import read_dense
from torchrec_checknrun.tools.fused import fused_rows, inference_rows
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.tools.values_json import values_json

Rows = Literal["full", "fused"]
Layout = Literal["stored", "inference"]
VALUES_NAME = "values.json"
"""The file beside the tensors, with all other values."""
FUSED_OPTIMIZER = "fused_optimizer"
"""Prefix of the names of tables' optimizer state."""
STATE_FILE = "dense.safetensors"

_DCP_METADATA = ".metadata"
_SYSTEMS_NUMBER = re.compile(r"\(os error (\d+)\)")
"""The form in which Rust's libraries, safetensors' too, write an error's number."""
_NAME_BYTES = 255
"""The most bytes that file systems allow a name."""
_CACHE_BYTES = 64 << 20
"""Small, since every chunk is used once."""


@dataclass
class Exported:
    """The content of an export.

    Attributes:
        tensors: shapes by name.
        tables: by table, ``full``, or the form in which its rows are stored.
        values: names of the values in ``values.json``, which are no tensors.
        files: names of the safetensors files.
    """

    id: str
    tensors: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def export_dcp(
    root: Folder,
    chain: Chain,
    target: str | os.PathLike[str] | Folder,
    *,
    optimizer: bool = True,
    scratch: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Exported:
    """Write a checkpoint that stock ``dcp.load`` reads into plain tensors.

    Names: ``<table>.weight``; ``fused_optimizer.<table>.<state>``; of the model's dense part those
    of its state dict; of other states see ``tools.dense``. Values that are no tensors go to
    ``values.json``, since DCP would pickle them.

    Disk: all tables once more during the export. Memory: the dense part.

    Args:
        chain: the chain to export, see ``chain.resolve``.
        target: a folder, or any fsspec URL, that is empty or missing.
        optimizer: whether to write the tables' optimizer state.
        scratch: a folder for the scratch files; None: the system's.
        progress: called after every table with the rows done and the rows of all tables.

    Raises:
        CheckpointExists: the target is not empty.
        CorruptCheckpoint, UnsupportedFormat, IncompatibleCheckpoint: as a restore does.
        OSError: the storage failed.
    """
    into = Folder.of(target)
    _make_empty(into)
    content = read_content(root, chain)
    read = content.reader(root)
    tensors, values = _split(chain, read_dense(root, content.chunks[-1], read))
    done = Exported(chain.head.id, values=sorted(values))
    with tempfile.TemporaryDirectory(dir=scratch, prefix="checknrun-") as folder:
        for table, reader in _readers(root, content, read, progress):
            place = _restored(reader, Path(folder), optimizer)
            done.tables[table] = "full"
            named = {f"{table}.weight": place["weight"]}
            named |= {
                f"{FUSED_OPTIMIZER}.{table}.{n}": t for n, t in place.items() if n != "weight"
            }
            if clash := sorted(named.keys() & tensors.keys()):
                raise IncompatibleCheckpoint(
                    f"{chain.head.id} has a table and a state object that would both be called "
                    f"{clash[0]!r}: export to safetensors (--format safetensors), where tables "
                    "have files of their own, or rename the state object and save again"
                )
            tensors |= named
        _save_dcp(into, tensors)
        into.put(VALUES_NAME, values_json(chain, values, done.tables))
        done.tensors = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return done


def _save_dcp(into: Folder, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    def save(kind: Any, place: str) -> None:
        writer = kind(place, per_thread_copy_ahead=0)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

    with warnings.catch_warnings():
        # The warning about a single process, which is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        # Not the target as given: DCP takes a ~ for a folder's name.
        with _of_storage(into):
            if _is_local(into):
                save_in_place(Path(into.url), lambda place: save(dcp.FileSystemWriter, str(place)))
            else:
                save(FsspecWriter, into.url)


@contextmanager
def _of_storage(target: Folder) -> Iterator[None]:
    """Raise what the formats' libraries make of an error of the storage as that error.

    Raises:
        StorageFailed: names the target and the remedy.
    """
    from torch.distributed.checkpoint import CheckpointException  # which is no Exception

    try:
        yield
    except (Exception, CheckpointException) as error:
        found = _storage_error(error)
        if found is None or found is error:
            raise
        raise storage_failed(found, f"writing to {target}") from error


def _storage_error(error: BaseException) -> OSError | None:
    """Find the error of the storage that a library's error stands for."""
    todo, seen = [error], set[int]()
    while todo:
        at = todo.pop()
        if isinstance(at, OSError):
            return at
        if told := _SYSTEMS_NUMBER.search(str(at)):
            return OSError(int(told[1]), os.strerror(int(told[1])))
        if id(at) not in seen:
            seen.add(id(at))
            todo += [each for each in (at.__cause__, at.__context__) if each is not None]
            todo += [each for each, _ in getattr(at, "failures", {}).values()]
    return None


def export_safetensors(
    root: Folder,
    chain: Chain,
    target: str | os.PathLike[str] | Folder,
    *,
    rows: Rows = "full",
    layout: Layout = "stored",
    optimizer: bool = True,
    scratch: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Exported:
    """Write one safetensors file for each table, one for the dense part, and ``values.json``.

    A table's file ``<table>.safetensors`` has ``weight``, ``(rows, dim)``, and its optimizer states
    by name. With ``fused``, tables of which all rows are stored quantized at one width have their
    uint8 rows as stored instead, see ``fused_rows``; other tables are written in full, and
    ``Exported.tables`` gives the reason. Metadata of each file: checkpoint, step, table, and the
    form of the rows.

    Disk: the largest table once more during the export. Memory: the dense part.

    Args:
        target: a local folder (``file://`` too), empty or missing.
        rows: ``full``, or ``fused`` for rows as stored.
        layout: of fused rows: as ``stored``, or as TorchRec's ``inference`` tables hold them, see
            ``inference_rows``.
        chain, optimizer, scratch, progress: as in ``export_dcp``.

    Raises:
        CheckpointExists: the target is not empty.
        CorruptCheckpoint, UnsupportedFormat, IncompatibleCheckpoint: as a restore does.
        OSError: the storage failed, or the target is not a local folder.
    """
    from safetensors.torch import save_file

    into = Folder.of(target)
    if not _is_local(into):
        raise OSError(
            f"safetensors need a local folder, not {into}: export to one, then copy the files"
        )
    _make_empty(into)
    content = read_content(root, chain)
    read = content.reader(root)
    tensors, values = _split(chain, read_dense(root, content.chunks[-1], read))
    _check_names(chain, bool(tensors))
    _check_types(chain, tensors)
    done = Exported(chain.head.id, values=sorted(values))
    about = {"checkpoint": chain.head.id, "step": str(chain.head.step)}

    def save(tensors: dict[str, torch.Tensor], name: str, about: dict[str, str]) -> None:
        with _of_storage(into):
            save_in_place(Path(into.url), lambda place: save_file(tensors, place / name, about))

    for table, reader in _readers(root, content, read, progress):
        with tempfile.TemporaryDirectory(dir=scratch, prefix="checknrun-") as folder:
            place, stored = _restored(reader, Path(folder), optimizer), "full"
            if rows == "fused":
                stored = _fuse(place, read, content, table, Path(folder), layout)
            name = f"{table}.safetensors"
            save(place, name, {**about, "table": table, "rows": stored})
            done.files.append(name)
            done.tables[table] = stored
            done.tensors |= {f"{table}/{n}": list(t.shape) for n, t in place.items()}
    if tensors:
        plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save(plain, STATE_FILE, about)
        done.files.append(STATE_FILE)
        done.tensors |= {name: list(tensor.shape) for name, tensor in tensors.items()}
    into.put(VALUES_NAME, values_json(chain, values, done.tables))
    return done


def save_in_place(target: Path, save: Callable[[Path], object]) -> None:
    """Write files into a folder without following links in it; replace files of the same name.

    The files go through a private subfolder first. DCP's metadata come last: a folder without them
    is no checkpoint, whatever an export that was killed has left.

    Args:
        save: function that writes files into a given folder.
    """
    with tempfile.TemporaryDirectory(dir=target, prefix=".checknrun-") as private:
        save(Path(private))
        (plain := Path(private, ".mode")).touch()  # as the user wants files to be
        mode = stat.S_IMODE(plain.stat().st_mode)
        plain.unlink()
        for path in sorted(Path(private).iterdir(), key=lambda path: path.name == _DCP_METADATA):
            with suppress(OSError):  # some file systems have one mode for all
                path.chmod(mode)  # safetensors makes files that nobody else may read
            os.replace(path, target / path.name)


def _restored(reader: TableReader, folder: Path, optimizer: bool) -> dict[str, torch.Tensor]:
    """Restore a whole table into scratch files."""
    shard = reader.empty(0, reader.shape.rows, folder)
    reader.restore([shard])
    if not optimizer:
        return {"weight": shard.weight}
    _check_states(reader.table, shard.optimizer, ("weight",))
    return {"weight": shard.weight, **shard.optimizer}


def _fuse(
    place: dict[str, torch.Tensor],
    read: Read,
    content: ChainContent,
    table: str,
    folder: Path,
    layout: Layout,
) -> str:
    """Replace a restored table's rows by fused ones where it has these; return their form."""
    if layout == "inference":
        fused = inference_rows(content, table, place["weight"], folder)
    else:
        fused = fused_rows(read, content, table, folder)
    if fused.tensors:
        del place["weight"]
        _check_states(table, place, fused.tensors)
        place |= fused.tensors
    return fused.stored


def _check_states(table: str, states: Iterable[str], names: Iterable[str]) -> None:
    """Refuse optimizer states whose names clash with those of a table's rows."""
    if clash := sorted(set(states) & set(names)):
        raise IncompatibleCheckpoint(
            f"table {table!r} has an optimizer state {clash[0]!r}, a name that its rows need: "
            "export without optimizer state (--no-optimizer)"
        )


def _check_names(chain: Chain, dense: bool) -> None:
    """Refuse tables that can't have a file of their own.

    Args:
        dense: whether there will be a file of the dense part.
    """
    for table in chain.head.tables:
        name = f"{table}.safetensors"
        if not is_plain_name(name) or len(name.encode(errors="replace")) > _NAME_BYTES:
            raise IncompatibleCheckpoint(
                f"table {table!r} can't be a file's name: export to DCP instead (--format dcp)"
            )
        if dense and name.lower() == STATE_FILE:  # some file systems don't tell cases apart
            raise IncompatibleCheckpoint(
                f"table {table!r} would be written to {name}, the file of the dense part: "
                "export to DCP instead (--format dcp)"
            )


def _check_types(chain: Chain, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of types that safetensors lack."""
    from safetensors.torch import save

    for name, tensor in tensors.items():
        try:
            save({"x": torch.empty(0, dtype=tensor.dtype)})
        except (KeyError, ValueError, RuntimeError):
            raise IncompatibleCheckpoint(
                f"{name} of {chain.head.id} is of {tensor.dtype}, which safetensors don't have: "
                "export to DCP instead (--format dcp)"
            ) from None


def _readers(
    root: Folder,
    content: ChainContent,
    read: Read,
    progress: Callable[[int, int], object] | None,
) -> Iterator[tuple[str, TableReader]]:
    tables = content.chain.head.tables
    total, done = sum(table.rows for table in tables.values()), 0
    for name, table in tables.items():
        yield name, TableReader(content, name, ChunkCache(root, _CACHE_BYTES, read))
        done += table.rows
        if progress is not None:
            progress(done, total)


def _is_local(folder: Folder) -> bool:
    """Tell whether a folder is on this machine: its ``url`` is a path."""
    return os.path.isabs(folder.url)


def _make_empty(into: Folder) -> None:
    if names := into.names():
        raise CheckpointExists(
            f"{into} holds {names[0]!r} already: export into a new or empty folder"
        )
    into.create()


def _split(
    chain: Chain, dense: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split the dense part into tensors and other values."""
    tensors = {name: v for name, v in dense.items() if isinstance(v, torch.Tensor)}
    values = {name: v for name, v in dense.items() if name not in tensors}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            raise IncompatibleCheckpoint(
                f"{name} of {chain.head.id} is a NumPy array of {value.dtype}, which neither DCP "
                "nor safetensors have: save it as another type, such as float64, and export that"
            )
    return tensors, values
