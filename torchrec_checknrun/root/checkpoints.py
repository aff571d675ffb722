"""Find the checkpoints of a root: tell their directories from others, read and number them.

Directories that this package named carry their sequence number. A checkpoint saved through
``dcp.save`` under a user's name has its number in the manifest only. Where no checkpoint is found,
``describe_empty`` describes the root instead: most such roots are typos in the name.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.checks import MANIFEST_BYTES
from torchrec_checknrun.format.manifest import Manifest, parse_manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, CheckpointId, is_plain_name, parse_ids
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import FOLDER

logger = logging.getLogger(__name__)

_RANK_FILE = re.compile(r"rank-[0-9]{5,}\.bin")
_MOST_NAMED = 5
"""The most names that a description of a root lists."""
_expected: dict[str, frozenset[str]] = {}
"""By root, the newest checkpoints that this process knows of."""


@dataclass(frozen=True)
class Listing:
    """The names in a root at one instant.

    Attributes:
        ids: those that are checkpoint ids, parsed.
    """

    names: Sequence[str]
    ids: Mapping[str, CheckpointId]

    @classmethod
    def of(cls, names: Sequence[str]) -> Listing:
        """Parse names."""
        return cls(names, parse_ids(names))

    def only(self, names: Iterable[str]) -> Listing:
        """Return a part of the listing."""
        return Listing([*names], self.ids)


@dataclass
class Found:
    """The checkpoints among a root's names.

    Attributes:
        numbered: sequence numbers and names, highest first.
        damaged: by name, why a checkpoint of unknown number can't be read.
        absent: names without a manifest.
    """

    numbered: list[tuple[int, str]]
    damaged: dict[str, Exception]
    absent: set[str]


def expect(root: Folder, ids: Iterable[str], newer: bool = False) -> None:
    """Remember the newest checkpoints of a root: some stores' listings lag behind.

    Args:
        ids: of checkpoints that were committed, or may have been.
        newer: whether they are newer than those remembered before, and take their place.
    """
    known = frozenset() if newer else _expected.get(root.url.rstrip("/"), frozenset())
    _expected[root.url.rstrip("/")] = known.union(ids)


def names_in(root: Folder) -> list[str]:
    """Return the names in a root, sorted, with checkpoints that this process knows of and that are
    there, though the listing lacks them.
    """
    names = root.names()
    unlisted = _expected.get(root.url.rstrip("/"), frozenset()).difference(names)
    return sorted([*names, *(id for id in unlisted if has_manifest(root, id))])


def read_manifest(root: Folder, name: str) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointNotFound: the directory has no manifest: its save was never begun or committed.
        CorruptCheckpoint, UnsupportedFormat: the manifest can't be read.
    """
    manifest = _parse(root, name)
    problem = None
    if manifest.id != name:
        problem = f"is the manifest of {manifest.id!r}: it was moved or copied"
    elif not _fits(name, manifest.sequence):
        problem = f"has sequence number {manifest.sequence}"
    if problem is not None:
        raise CorruptCheckpoint(f"{root}/{name}/{MANIFEST_NAME} {problem}")
    return manifest


def committed(root: Folder, listing: Listing | None = None) -> list[str]:
    """Return ids of directories that may hold a committed checkpoint, highest number first; last
    come those whose number is unknown because their manifests are damaged.

    Args:
        listing: the names in the root, if listed already.

    Raises:
        StorageFailed: the root can't be listed, or the storage doesn't answer.
    """
    found = find_checkpoints(root, listing or Listing.of(root.names()))
    return [name for _, name in found.numbered] + list(found.damaged)


def may_be_newer(root: Folder, name: str) -> bool:
    """Return whether a directory has a manifest; False for one of a user's naming that this process
    may not look into, which ``find_checkpoints`` passes over.

    Raises:
        StorageFailed: the storage failed.
    """
    try:
        return has_manifest(root, name)
    except StorageFailed as error:
        if error.errno != errno.EACCES or name in parse_ids([name]):
            raise
        return False


def has_manifest(root: Folder, name: str) -> bool:
    """Return whether a directory of the root contains a file with the name of a manifest.

    Raises:
        StorageFailed: the storage failed.
    """
    if not is_plain_name(name) or root.is_link(name):
        return False
    return (root / name).size(MANIFEST_NAME) is not None


def is_cut(root: Folder, known: Manifest, files: Mapping[str, int]) -> bool:
    """Tell whether a manifest, known from an earlier look, has another size and is damaged."""
    try:
        size = files.get(MANIFEST_NAME, known.size)
        return size != known.size and read_manifest(root, known.id).link != known.link
    except CheckNRunError:
        return True


def files_problem(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Compare a checkpoint's rank files with the sizes of the files in its directory; return the
    first difference, None if there is none.
    """
    for file in manifest.files:
        size = sizes.get(file.name)
        if size != file.size:
            found = "is missing" if size is None else f"has {size}"
            return f"{file.name} should have {file.size} bytes, but {found}"
    return None


def sizes_of(root: Folder, manifest: Manifest) -> dict[str, int]:
    """Return the sizes of the files in a checkpoint's directory, by name. A rank file that a
    listing lacks is looked for by itself: some stores' listings lag behind.
    """
    sizes = root.sizes(manifest.id)
    for file in manifest.files:
        if file.name not in sizes:
            if (size := (root / manifest.id).size(file.name)) is None:
                break
            sizes[file.name] = size
    return sizes


def check_sizes(root: Folder, manifest: Manifest) -> None:
    """Check that a checkpoint's files exist and have their sizes.

    Raises:
        CorruptCheckpoint: names the file.
    """
    problem = files_problem(manifest, sizes_of(root, manifest))
    if problem is not None:
        raise CorruptCheckpoint(f"{root}/{manifest.id}/{problem}")


def read_sound(root: Folder, name: str) -> Manifest | None:
    """Return a checkpoint's manifest if its files have their sizes; None if anything is wrong.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    try:
        check_sizes(root, manifest := read_manifest(root, name))
    except (CheckNRunError, StorageFailed) as error:
        if isinstance(error, StorageUnreachable):
            raise
        return None
    return manifest


def highest_sequence(root: Folder) -> int:
    """Return the highest sequence number in use, committed or not; 0 if there is none."""
    found = find_checkpoints(root, Listing.of(root.names()))
    return max((sequence for sequence, _ in found.numbered), default=0)


def find_checkpoints(root: Folder, listing: Listing) -> Found:
    """Tell checkpoints from other names in a root.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    ages: list[tuple[int, bool, str]] = []
    damaged: dict[str, Exception] = {}
    absent: set[str] = set()
    for name in listing.names:
        if name == FOLDER:
            continue
        if (id := listing.ids.get(name)) is not None:
            ages.append((id.sequence, id.is_copy, name))
            continue
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            logger.warning("%s/%r is passed over: its name is not UTF-8; rename it", root, name)
            continue
        # A user's name: only the manifest knows the number. A link is not a directory of this
        # root: perhaps somebody's `latest`.
        if not root.is_link(name):
            try:
                ages.append((_parse(root, name).sequence, False, name))
            except CheckpointNotFound:
                absent.add(name)
            except (CheckNRunError, StorageFailed) as error:
                if (problem := _problem(root, name, error)) is not None:
                    damaged[name] = problem
    numbered = [(sequence, name) for sequence, _, name in sorted(ages, reverse=True)]
    return Found(numbered, damaged, absent)


def find_forbidden(root: Folder, listing: Listing | None = None) -> Iterator[str]:
    """Yield the directories that can't be looked into although they may be checkpoints of a user's
    naming, each with the error.
    """
    listing = Listing.of(root.names()) if listing is None else listing
    for name in listing.names:
        if name == FOLDER or _is_of_others(name) or root.is_link(name):
            continue
        if name not in listing.ids:
            try:
                _parse(root, name)
            except CheckNRunError:
                continue
            except StorageFailed as error:
                yield f"{name}: {error}"


def describe_empty(root: Folder) -> str:
    """Describe a root without committed checkpoints: its content, and folders beside it with a
    similar name.

    Raises:
        StorageFailed: the root can't be listed.
    """
    listing = Listing.of([name for name in root.names() if name != FOLDER])
    names = listing.names
    neighbours = _neighbours(root)
    begun = [name for name in names if name in listing.ids]
    there = [name for name in begun if has_manifest(root, name)]
    if there:
        found = f"{root} holds {len(there)} checkpoint(s), as {there[-1]}"
    elif begun:
        found = f"{root} holds {len(begun)} checkpoint(s) that were begun, none committed"
    elif names:
        shown = ", ".join(map(_shown, names[:_MOST_NAMED]))
        found = f"{root} holds no checkpoint, but {shown}{', …' * (len(names) > _MOST_NAMED)}"
    elif root.name in neighbours and root.parent.size(root.name) is not None:
        found = f"{root} is a file, where a folder should be"
    elif root.name in neighbours:
        found = f"{root} is empty"
    else:
        found = f"{root} does not exist"
    matches = difflib.get_close_matches(root.name, neighbours, _MOST_NAMED, cutoff=0.75)
    similar = [name for name in matches if name != root.name]
    return f"{found} (beside it: {', '.join(similar)})" if similar else found


def require_root(root: Folder) -> None:
    """Refuse a folder in which no run has ever saved anything.

    Raises:
        CheckpointNotFound: describes the folder's content.
        StorageFailed: the root can't be listed.
    """
    names = root.names()
    if FOLDER not in names and not committed(root, Listing.of(names)):
        raise CheckpointNotFound(
            f"no run has saved anything here: {describe_empty(root)}. Name the folder or URL that "
            "was given to Checkpointer"
        )


def _fits(name: str, sequence: int) -> bool:
    """Return whether a directory of this name may hold a checkpoint of a sequence number."""
    id = parse_ids([name]).get(name)
    return id is None or id.sequence == sequence


def _parse(root: Folder, name: str) -> Manifest:
    """Read a manifest as ``read_manifest``, but accept a copy of another checkpoint's. One that
    seems damaged is read again: it may have been on its way, and a run would abandon it.
    """
    where = f"{root}/{name}/{MANIFEST_NAME}"
    try:
        data = _read_small(root, name)
        try:
            return parse_manifest(data, where)
        except CorruptCheckpoint:
            if (again := _read_small(root, name)) == data:
                raise
            return parse_manifest(again, where)
    except FileNotFoundError:
        raise CheckpointNotFound(
            f"no committed checkpoint {name!r} in {root} (no {MANIFEST_NAME}): its "
            "save was interrupted, or the name or the root is wrong"
        ) from None


def _read_small(root: Folder, name: str) -> bytes:
    """Read a manifest file, but no more of it than shows that it is too large."""
    if not is_plain_name(name):
        raise CheckpointNotFound(f"{name!r} is not a checkpoint's name: give its id, as in {root}")
    if root.is_link(name):
        raise CorruptCheckpoint(
            f"{root}/{name} is a symbolic link, where a checkpoint is a directory of its root: "
            "copy the checkpoint there to use it"
        )
    return (root / name).read(MANIFEST_NAME, 0, MANIFEST_BYTES + 1)


def _problem(root: Folder, name: str, error: CheckNRunError | StorageFailed) -> Exception | None:
    """Return why a directory of a user's naming can't be read; None for one to pass over.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    if isinstance(error, StorageUnreachable):
        raise error
    try:
        if _is_checkpoint(root, name, error):
            return error
    except StorageUnreachable:
        raise
    except StorageFailed as other:  # the directory can't be listed
        error = other if isinstance(error, CheckNRunError) else error
    if isinstance(error, CheckNRunError):
        return None
    if error.errno != errno.EACCES:
        return error
    # Others' directories lie beside checkpoints.
    if not _is_of_others(name):
        logger.warning("%s/%s is passed over: %s", root, name, error)
    return None


def _is_of_others(name: str) -> bool:
    """Return whether a name is known to be no checkpoint's: a hidden one, or the file system's."""
    return name.startswith(".") or name == "lost+found"


def _is_checkpoint(root: Folder, name: str, error: CheckNRunError | StorageFailed) -> bool:
    """Return whether an unreadable manifest is this package's: others use the file name, too."""
    return isinstance(error, UnsupportedFormat) or any(
        _RANK_FILE.fullmatch(file) for file in (root / name).names()
    )


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _neighbours(root: Folder) -> list[str]:
    """List the names beside the root, itself included; none if the parent can't be listed."""
    try:
        return root.parent.names()
    except (CheckNRunError, OSError):
        return []
