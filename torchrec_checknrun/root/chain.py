"""Which checkpoints a restore needs, in order: from a chain's full checkpoint to its head."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    CheckpointNotFound,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.checks import MANIFEST_BYTES
from torchrec_checknrun.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    is_plain_name,
    parse_manifest,
    sequence_of,
)
from torchrec_checknrun.root.claims import FOLDER, read_claims, require_claim
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)

_RANK_FILE = re.compile(r"rank-[0-9]{5,}\.bin")
_LOOKS = 10
"""How often a root is looked at that changes each time."""


@dataclass(frozen=True)
class Chain:
    """A full checkpoint and the differential ones upon it, oldest first."""

    manifests: tuple[Manifest, ...]

    @property
    def head(self) -> Manifest:
        return self.manifests[-1]

    @property
    def baseline(self) -> Manifest:
        return self.manifests[0]

    @property
    def lossy(self) -> bool:
        return any(manifest.lossy for manifest in self.manifests)

    @property
    def widths(self) -> dict[str, int]:
        """By table, the fewest bits that a value in the chain may be stored in."""
        widths: dict[str, int] = {}
        for manifest in self.manifests:
            narrow(widths, manifest)
        return widths


def narrow(widths: dict[str, int], manifest: Manifest) -> None:
    """Lowers ``Chain.widths`` to those of one more checkpoint."""
    for name, table in manifest.tables.items():
        widths[name] = min(table.value_bits, widths.get(name, table.value_bits))


def read_manifest(root: Folder, name: str) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        CheckpointNotFound: the directory has none: never begun, or never committed.
        CorruptCheckpoint, UnsupportedFormat: it can't be read.
    """
    where = f"{root}/{name}/{MANIFEST_NAME}"
    manifest = _parse(root, name)
    if manifest.id != name:
        raise CorruptCheckpoint(
            f"{where} is the manifest of {manifest.id!r}: it was moved or copied"
        )
    if sequence_of(name) not in (None, manifest.sequence):
        raise CorruptCheckpoint(f"{where} has sequence number {manifest.sequence}")
    return manifest


def _parse(root: Folder, name: str) -> Manifest:
    """As ``read_manifest``; a copy of another checkpoint's will do."""
    try:
        data = _read_small(root, name)
    except FileNotFoundError:
        raise CheckpointNotFound(
            f"no committed checkpoint {name!r} in {root} (no {MANIFEST_NAME}): its "
            "save was interrupted, or the name or the root is another"
        ) from None
    return parse_manifest(data, f"{root}/{name}/{MANIFEST_NAME}")


def _read_small(root: Folder, name: str) -> bytes:
    """A manifest file's content, or so much of it that it is too large."""
    if not is_plain_name(name):
        raise CheckpointNotFound(f"{name!r} is not a checkpoint's name: give its id, as in {root}")
    if root.is_link(name):
        raise CorruptCheckpoint(
            f"{root}/{name} is a symbolic link: a checkpoint is a directory of its root; copy it "
            "there if it is wanted"
        )
    return (root / name).read(MANIFEST_NAME, 0, MANIFEST_BYTES + 1)


def is_copy(name: str) -> bool:
    """Whether a checkpoint of this name is a compacted one: no other's id has such a digit."""
    return sequence_of(name) is not None and name[-8] >= "8"


def age(sequence: int, name: str) -> tuple[int, bool, str]:
    """What checkpoints are sorted by: the newest has the highest.

    A copy comes before what it was made of, also where that was named by a user.
    """
    return sequence, is_copy(name), name


def committed(root: Folder, names: Iterable[str] | None = None) -> list[str]:
    """Ids of directories that may hold a committed checkpoint, highest sequence number first.

    Last come those of which nothing tells the number: their manifests are damaged.

    Args:
        names: what is in the root, if that is known.

    Raises:
        StorageFailed: the root can't be listed, or doesn't answer.
    """
    found = _sequences(root, root.names() if names is None else names)
    return [name for _, name in found.numbered] + list(found.damaged)


def has_manifest(root: Folder, name: str) -> bool:
    """Return whether something in the root was committed as a checkpoint, by its manifest's name.

    Raises:
        StorageFailed: the storage refused.
    """
    if not is_plain_name(name) or root.is_link(name):
        return False
    return (root / name).size(MANIFEST_NAME) is not None


def highest_sequence(root: Folder) -> int:
    """The highest sequence number in use, committed or not; 0 where there is none."""
    return max((sequence for sequence, _ in _sequences(root, root.names()).numbered), default=0)


@dataclass
class _Found:
    """Checkpoints with their sequence numbers, highest first; what is wrong with those of which
    nothing tells the number; names in which no manifest was found.
    """

    numbered: list[tuple[int, str]]
    damaged: dict[str, Exception]
    absent: set[str]


def _sequences(root: Folder, names: Iterable[str]) -> _Found:
    """Tell checkpoints from what else is in a root."""
    found: list[tuple[int, str]] = []
    damaged: dict[str, Exception] = {}
    absent: set[str] = set()
    for name in names:
        if name == FOLDER:
            continue
        sequence = sequence_of(name)
        if sequence is None and not _is_unicode(name):
            logger.warning("%s/%r is passed over: its name is not UTF-8; rename it", root, name)
            continue
        # Saved through dcp.save under a name of the user's own: only its manifest knows. A link is
        # no directory of this root: perhaps somebody's `latest`.
        if sequence is None and not root.is_link(name):
            try:
                sequence = _parse(root, name).sequence
            except CheckpointNotFound:
                absent.add(name)
                continue
            except (CheckNRunError, StorageFailed) as error:
                if (problem := _problem(root, name, error)) is not None:
                    damaged[name] = problem
        if sequence is not None:
            found.append((sequence, name))
    return _Found(sorted(found, key=lambda one: age(*one), reverse=True), damaged, absent)


def _is_unicode(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _problem(root: Folder, name: str, error: CheckNRunError | StorageFailed) -> Exception | None:
    """Say why a directory of a user's own naming can't be read; None for one that is passed over.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    if isinstance(error, CheckNRunError):
        try:
            return error if _is_checkpoint(root, name, error) else None
        except StorageFailed as other:  # the manifest can be read, but its directory not listed
            error = other
    if isinstance(error, StorageUnreachable):
        raise error
    if error.errno != errno.EACCES:
        return error
    # Others' directories lie beside checkpoints, as lost+found does.
    logger.warning("%s/%s is passed over: %s", root, name, error)
    return None


def _forbidden(root: Folder) -> Iterator[str]:
    """Say which directories nobody can look into, and which may well be checkpoints of a user's own
    naming: what others keep there has a dot before its name, or is lost+found.
    """
    for name in root.names():
        if name in (FOLDER, "lost+found") or name.startswith(".") or root.is_link(name):
            continue
        if sequence_of(name) is None:
            try:
                _parse(root, name)
            except CheckNRunError:
                continue
            except StorageFailed as error:
                yield f"{name}: {error}"


def _is_checkpoint(root: Folder, name: str, error: CheckNRunError) -> bool:
    """Whether a manifest that can't be read is one of ours: others use the file's name, too."""
    return isinstance(error, UnsupportedFormat) or any(
        _RANK_FILE.fullmatch(file) for file in (root / name).names()
    )


def incompatibility(child: Manifest, parent: Manifest) -> str | None:
    """Why a checkpoint can't build on the one that is where its parent was; None if it can."""
    link = child.parent
    assert link is not None, f"{child.id} is full"
    if parent.link != link:
        return (
            f"{child.id} needs {link.id} with checksum {link.checksum}, but the one there has "
            f"{parent.checksum}: it was replaced"
        )
    if parent.sequence >= child.sequence:  # else a chain could go round in a circle
        return (
            f"{child.id} needs {link.id}, which is no older one: its sequence number is "
            f"{parent.sequence}, and should be below {child.sequence}"
        )
    if _sizes(parent) != _sizes(child):
        return f"{child.id} and its parent {link.id} hold different tables"
    return None


def _sizes(manifest: Manifest) -> dict[str, tuple[int, int]]:
    return {name: (table.rows, table.dim) for name, table in manifest.tables.items()}


def resolve(root: Folder, name: str) -> Chain:
    """The chain that ends at ``name``, its manifests and file sizes checked.

    Raises:
        CheckpointNotFound: ``name`` itself is not a committed checkpoint.
        ChainBroken: a checkpoint it needs is missing, damaged or another one now, or was never one
            that it could build on.
        CorruptCheckpoint, UnsupportedFormat: ``name``'s own manifest or files are damaged.
    """
    manifests = [read_manifest(root, name)]
    while (link := manifests[-1].parent) is not None:
        child = manifests[-1]
        try:
            parent = read_manifest(root, link.id)
        except CheckNRunError as error:
            raise ChainBroken(
                f"{child.id} needs {link.id}, which can't be used: {error}"
            ) from error
        problem = incompatibility(child, parent)
        if problem is not None:
            raise ChainBroken(problem)
        manifests.append(parent)
    check_sizes(root, manifests[0])
    for parent in manifests[1:]:
        try:
            check_sizes(root, parent)
        except CorruptCheckpoint as error:
            raise ChainBroken(f"{name} needs {parent.id}, which is damaged: {error}") from error
    return Chain(tuple(reversed(manifests)))


def newest(
    root: Folder, unusable: Container[str] = (), *, answers: bool = False
) -> tuple[Chain | None, list[str]]:
    """The newest whole chain, and why newer checkpoints, or perhaps newer ones, were passed over.

    A writer may commit and prune meanwhile. So whatever was passed over counts only if the root
    holds the same as before; else it is looked at again.

    Args:
        unusable: ids to pass over without a word.
        answers: what the storage can't read is not passed over either.

    Raises:
        ClaimDamaged: checkpoints were committed, and which of them count can't be told.
        StorageUnreachable: the storage doesn't answer: going on from an older one would leave the
            newer ones behind.
        StorageFailed: the root can't be listed, or changes each time that it is looked at; with
            ``answers``, or anything in it can't be read.
    """
    for _ in range(_LOOKS):
        names = root.names()
        chain, problems, absent = _newest(root, names, unusable, answers)
        if chain is not None and not problems and not absent:
            return chain, problems
        # In this order: whoever commits and then deletes is seen by the one or by the other.
        if root.names() == names and not any(has_manifest(root, name) for name in absent):
            return chain, problems if chain is not None else [*problems, *_forbidden(root)]
    raise StorageFailed(
        errno.EBUSY,
        f"{root}: checkpoints come and go faster than they can be looked at, so that the newest "
        "can't be told: end the process that writes there, or try again",
    )


def newest_required(root: Folder, *, answers: bool = False) -> Chain:
    """Return the newest whole chain.

    Raises:
        CheckpointNotFound, ChainBroken: there is none.
        ClaimDamaged, StorageFailed: as ``newest``.
    """
    chain, problems = newest(root, answers=answers)
    if chain is not None:
        return chain
    if problems:
        raise ChainBroken(f"{root} holds no whole chain: {'; '.join(problems)}")
    raise CheckpointNotFound(f"no committed checkpoint in {root}")


def _newest(
    root: Folder, names: list[str], unusable: Container[str], answers: bool
) -> tuple[Chain | None, list[str], set[str]]:
    """Look once; also return the names in which a manifest was looked for and not found."""
    claims = read_claims(root)
    found = _sequences(root, names)
    absent = found.absent
    # Nothing tells how new these are.
    problems = [f"{name}: {error}" for name, error in found.damaged.items() if name not in unusable]
    for error in found.damaged.values():
        claims.decided()
        if isinstance(error, StorageFailed):
            raise error
    for _, name in found.numbered:
        if name in unusable:
            continue
        try:
            chain = resolve(root, name)
        except CheckpointNotFound:
            logger.info("%s in %s was never committed", name, root)
            absent.add(name)
            continue
        except (CheckNRunError, OSError) as error:
            if isinstance(error, StorageUnreachable) or (answers and isinstance(error, OSError)):
                raise
            claims.decided()  # only now: what was never committed begins anew in any case
            problems.append(f"{name}: {error}")
            continue
        claim = claims.decided()
        if claim is not None and chain.head.epoch > claim.epoch:
            require_claim(root, name, chain.head.epoch)
        if claim is None or claim.admits(name, chain.head.epoch):
            return chain, problems, absent
        problems.append(
            f"{name}: it was committed by a writer that had been replaced by then, and doesn't "
            f"count: `checknrun adopt {root} {name}` makes it count"
        )
    return None, problems, absent


def check_sizes(root: Folder, manifest: Manifest) -> None:
    """Whether a checkpoint's files are there and as long as they were.

    Raises:
        CorruptCheckpoint: names the file.
    """
    folder = root / manifest.id
    sizes = folder.sizes()
    for file in manifest.files:
        size = sizes.get(file.name)
        if size != file.size:
            raise CorruptCheckpoint(
                f"{folder}/{file.name} should have {file.size} bytes, "
                + ("but is missing" if size is None else f"but has {size}")
            )
