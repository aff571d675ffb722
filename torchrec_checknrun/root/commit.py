"""Commit a checkpoint: the manifest is put last, between two looks at everything it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchrec_checknrun.errors import CorruptCheckpoint, SaveFailed
from torchrec_checknrun.format.manifest import MANIFEST_NAME, Manifest
from torchrec_checknrun.root.chain import files_problem
from torchrec_checknrun.root.claims import latest_claim
from torchrec_checknrun.root.lineage import note_number
from torchrec_checknrun.store.folder import Folder


def commit(
    root: Folder,
    folder: Folder,
    manifest: Manifest,
    *,
    before: Iterable[Callable[[], object]] = (),
    after: Callable[[], object] | None = None,
) -> None:
    """Put a checkpoint's manifest, which makes the checkpoint exist.

    Args:
        folder: the checkpoint's directory in ``root``; all rank files are durable there.
        before: called first; each raises an error if the commit must not happen.
        after: called last; raises an error if the commit doesn't count. None: the checkpoint must
            count under the latest claim.

    Raises:
        ValueError: readers would refuse the manifest.
        SaveFailed: the checkpoint was not committed, or its files are gone.
    """
    for check in before:
        check()
    _require_files(folder, manifest, "while it was written")
    data = manifest.to_bytes()
    folder.put(MANIFEST_NAME, data, new=True)
    note_number(root, manifest.sequence)
    # Between the last look and the put this process may have been stopped for hours.
    _require_files(folder, manifest, "while it was committed")
    if folder.read(MANIFEST_NAME) != data:
        raise SaveFailed(f"{folder}/{MANIFEST_NAME} is not the one written here")
    if after is not None:
        after()
        return
    claim = latest_claim(root)
    if claim is not None and not claim.admits(manifest.id, manifest.epoch):
        raise SaveFailed(
            f"a writer claimed {root} while {manifest.id} was committed, which therefore doesn't "
            "count: save again, into another directory"
        )


def _require_files(folder: Folder, manifest: Manifest, when: str) -> None:
    """Check that the files still have their sizes.

    Raises:
        SaveFailed: files are gone, which somebody may have taken for leftovers.
    """
    try:
        problem = files_problem(manifest, folder.sizes())
    except CorruptCheckpoint as error:
        problem = str(error)
    if problem is not None:
        raise SaveFailed(
            f"files of {manifest.id} went away {when}: {folder}: {problem}. Leave deleting to "
            "`retention` or `checknrun prune`"
        )
