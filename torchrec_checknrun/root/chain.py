"""Resolve chains: the checkpoints that a restore needs, from the full one to the head."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    CheckpointNotFound,
    StorageFailed,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import parse_id, parse_ids
from torchrec_checknrun.root.checkpoints import (
    Listing,
    check_sizes,
    describe_empty,
    find_checkpoints,
    find_forbidden,
    has_manifest,
    names_in,
    read_manifest,
    read_sound,
)
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import tells_nothing
from torchrec_checknrun.threads import at_once
from torchrec_checknrun.writers.claims import Claims, read_claims, require_claim
from torchrec_checknrun.writers.liveness import newer_epochs

logger = logging.getLogger(__name__)

_LOOKS = 10
"""The number of looks at a root that changes during each of them."""
_TOLD = 8
"""Problems that an error tells."""
_MOST_AHEAD = 16
"""Checkpoints that are read at once."""
IGNORED = "it was committed by a writer that had been replaced by then, and doesn't count"
"""Why a whole checkpoint is passed over, until somebody makes it count."""


@dataclass(frozen=True)
class Chain:
    """A full checkpoint and the differential ones based on it, oldest first."""

    manifests: tuple[Manifest, ...]

    @property
    def head(self) -> Manifest:
        """Return the newest checkpoint."""
        return self.manifests[-1]

    @property
    def baseline(self) -> Manifest:
        """Return the full checkpoint."""
        return self.manifests[0]

    @property
    def lossy(self) -> bool:
        """Return whether any checkpoint stores rows with a loss."""
        return any(manifest.lossy for manifest in self.manifests)

    @property
    def widths(self) -> dict[str, int]:
        """Return the fewest bits, by table, in which a value of the chain may be stored."""
        widths: dict[str, int] = {}
        for manifest in self.manifests:
            narrow(widths, manifest)
        return widths


def narrow(widths: dict[str, int], manifest: Manifest) -> None:
    """Lower ``Chain.widths`` to those of one more checkpoint."""
    for name, table in manifest.tables.items():
        widths[name] = min(table.value_bits, widths.get(name, table.value_bits))


def incompatibility(child: Manifest, parent: Manifest) -> str | None:
    """Return why a checkpoint can't build on the one in its parent's place; None if it can."""
    link = child.parent
    assert link is not None, f"{child.id} is full"
    is_parent = (parent.id, parent.checksum) == (link.id, link.checksum)
    if not is_parent and not stands_in(child, parent):
        return (
            f"{child.id} needs {link.id} with checksum {link.checksum}, but the one there has "
            f"{parent.checksum}: it was replaced"
        )
    if parent.sequence >= child.sequence:  # else a chain could be a circle
        return (
            f"{child.id} needs {link.id}, which is not older: its sequence number is "
            f"{parent.sequence}, and should be below {child.sequence}"
        )
    if parent.table_sizes != child.table_sizes:
        return f"{child.id} and its parent {link.id} hold different tables"
    if child.deltas.keys() != parent.deltas.keys():
        return (
            f"{child.id} stores {sorted(child.deltas)} as differences, and its parent {link.id} "
            f"{sorted(parent.deltas)}"
        )
    for table, digests in child.deltas.items():
        if digests.before != parent.deltas[table].after:
            return (
                f"{child.id} builds on rows of {table} with digest {digests.before}, but {link.id} "
                f"restores {parent.deltas[table].after}"
            )
    return None


def stands_in(child: Manifest, copy: Manifest) -> bool:
    """Tell whether a compacted copy of a child's parent can take the parent's place: a copy names
    its original by checksum; digests are compared like a parent's.
    """
    id = parse_id(copy.id)
    is_copy = id is not None and id.is_copy and copy.kind == "full"
    return is_copy and bool(child.deltas) and copy.previous == child.parent


def walk(
    head: Manifest,
    find: Callable[[Manifest, str], Manifest],
    stand_in: Callable[[Manifest], Manifest | None],
) -> Iterator[Manifest]:
    """Yield a checkpoint and those it builds on, newest first, each checked against its child.

    Args:
        find: returns the manifest of a child's parent, given the child and the parent's id; other
            errors than ``ChainBroken`` pass through.
        stand_in: returns a compacted copy of a child's parent, None without one: where the chain
            is broken further down, the one of the oldest child that has one ends it.

    Raises:
        ChainBroken: a checkpoint is missing, or can't build on the one in its parent's place.
    """
    path = [head]
    while (link := path[-1].parent) is not None:
        try:
            parent = find(path[-1], link.id)
            problem = incompatibility(path[-1], parent)
            if problem is not None:
                raise ChainBroken(problem)
        except ChainBroken:
            copy = stand_in(path[-1])
            while copy is None and len(path) > 1:
                path.pop()
                copy = stand_in(path[-1])
            if copy is None:
                raise
            parent = copy
        path.append(parent)
    yield from path


def resolve(
    root: Folder,
    name: str,
    known: MutableMapping[str, Manifest] | None = None,
    listed: list[str] | None = None,
) -> Chain:
    """Return the chain that ends at ``name``, its manifests and file sizes checked.

    Args:
        known: by id, checkpoints that such calls have checked, which are not read again; receives
            those that this call checks. None: there was no other call.
        listed: the names in the root, if they were listed before.

    Raises:
        CheckpointNotFound: ``name`` itself is not a committed checkpoint.
        ChainBroken: a checkpoint of the chain is missing, damaged, replaced, or was never a valid
            parent of its child.
        CorruptCheckpoint, UnsupportedFormat: ``name``'s own manifest or files are damaged.
    """
    checked = {} if known is None else known
    names = cache(root.names if listed is None else lambda: listed)
    ahead = _Ahead(root, names, checked)

    def find(child: Manifest, id: str) -> Manifest:
        lost: CheckNRunError | StorageFailed | None = None
        try:
            sound = checked.get(id) or ahead.get(id)
            parent = sound or read_manifest(root, id)
            if incompatibility(child, parent) is None:
                if sound is None:
                    check_sizes(root, parent)
                checked[id] = parent
                return parent
        except StorageUnreachable:
            raise
        except (CheckNRunError, StorageFailed) as error:
            lost = error
        copy = stand_in(child)
        if copy is not None:
            return copy
        if isinstance(lost, StorageFailed):
            raise lost
        if lost is not None:
            raise ChainBroken(f"{child.id} needs {id}, which can't be used: {lost}") from lost
        return parent  # refused by walk()

    def stand_in(child: Manifest) -> Manifest | None:
        return _find_copy(root, names, child)

    head = read_manifest(root, name)
    check_sizes(root, head)
    return Chain(tuple(walk(head, find, stand_in))[::-1])


@dataclass
class _Ahead:
    """A chain's next checkpoints, if the next older ones: read at once, since a store is far away.

    Attributes:
        names: returns the names in the root.
        known: checkpoints by id, which are not read.
    """

    root: Folder
    names: Callable[[], list[str]]
    known: Container[str]
    count: int = 1
    found: dict[str, Manifest] = field(default_factory=dict)

    def get(self, id: str) -> Manifest | None:
        """Return a checkpoint's manifest, as ``read_sound``; None to read it alone."""
        if id not in self.found and self.count > 1:  # most chains are of two
            acts = [partial(read_sound, self.root, each) for each in self._next(id)]
            self.found = {each.id: each for each in at_once(acts, "checknrun-chain") if each}
        self.count = min(2 * self.count, _MOST_AHEAD)
        return self.found.get(id)

    def _next(self, id: str) -> list[str]:
        """Return some checkpoints, from this one on, newest first; none of a hidden root."""
        with suppress(CheckNRunError, StorageFailed):
            ids = parse_ids(self.names())
            older = sorted(ids, key=lambda name: ids[name].sequence, reverse=True)
            first = older.index(id) if id in ids else len(older)
            return [each for each in older[first:] if each not in self.known][: self.count]
        return []


def _find_copy(root: Folder, names: Callable[[], list[str]], child: Manifest) -> Manifest | None:
    """Find a whole compacted copy that stands in for a checkpoint's parent; see ``copy_among``."""
    assert child.parent is not None
    lost = parse_id(child.parent.id)
    if lost is None or not child.deltas:
        return None
    for name, id in parse_ids(sorted(names(), reverse=True)).items():
        if id.is_copy and id.sequence == lost.sequence:
            with suppress(CheckNRunError):
                copy = read_manifest(root, name)
                if incompatibility(child, copy) is None:
                    check_sizes(root, copy)
                    return copy
    return None


def newest(
    root: Folder,
    unusable: Container[str] = (),
    *,
    known: Iterable[Manifest] = (),
    answers: bool = False,
    resumes: bool = False,
) -> tuple[Chain | None, list[str]]:
    """Find the newest complete chain; also return why newer (or unreadable) checkpoints were
    passed over.

    A writer may commit and prune meanwhile. Therefore checkpoints count as passed over only if the
    root still holds the same names; otherwise look again.

    Args:
        unusable: ids to pass over silently; what builds on one of them is passed over as well.
        known: checkpoints that the caller has read before, and may not find there any more.
        answers: raise storage errors instead of passing over what can't be read.
        resumes: a run goes on from there and abandons newer checkpoints: raise errors that don't
            speak of damage instead of passing over what may be sound.

    Raises:
        ClaimDamaged: checkpoints were committed, and which of them count can't be told.
        StorageUnreachable: the storage doesn't answer: resuming from an older checkpoint would
            abandon newer ones.
        StorageFailed: the root can't be listed, or changes during every look; with ``answers``,
            also if anything in the root can't be read, with ``resumes``, if this process may not
            read something newer.
        UnsupportedFormat: with ``resumes``, something newer is of a newer release.
    """
    for _ in range(_LOOKS):
        names, claims = names_in(root), cache(partial(read_claims, root))
        seen = {manifest.id: manifest for manifest in known}
        chain, problems, absent = _newest(root, names, claims, unusable, seen, answers, resumes)
        if chain is not None and not problems and not absent:
            return chain, problems
        if newer_epochs(root, claims().highest):
            continue  # others may count now
        # In this order: a writer that commits, then deletes is noticed by one or the other.
        if names_in(root) == names and not any(has_manifest(root, name) for name in absent):
            return chain, problems if chain is not None else [*problems, *find_forbidden(root)]
    raise StorageFailed(
        errno.EBUSY,
        f"{root}: checkpoints come and go faster than they can be read, so that the newest is "
        "unknown: end the process that writes there, or try again",
    )


def newest_required(root: Folder, *, answers: bool = False) -> Chain:
    """Return the newest complete chain; log why newer checkpoints were passed over.

    Raises:
        CheckpointNotFound, ChainBroken: there is none.
        ClaimDamaged, StorageFailed: as in ``newest``.
    """
    chain, problems = newest(root, answers=answers)
    if chain is not None:
        for problem in problems:
            logger.warning("passed over: %s", problem)
        return chain
    if problems:
        told = [*problems[:_TOLD], "…"] if len(problems) > _TOLD else problems
        raise ChainBroken(f"{root} holds no complete chain: {'; '.join(told)}")
    raise CheckpointNotFound(f"no committed checkpoint: {describe_empty(root)}")


def _newest(
    root: Folder,
    names: list[str],
    claims: Callable[[], Claims],
    unusable: Container[str],
    known: dict[str, Manifest],
    answers: bool,
    resumes: bool,
) -> tuple[Chain | None, list[str], set[str]]:
    """Look once; also return the names in which a manifest was looked for and not found.

    Args:
        claims: reads them once, when the first manifest was read: a writer that was replaced before
            then may have put it there just now.
    """
    found = find_checkpoints(root, Listing.of(names))
    absent = found.absent
    # Perhaps newer than the others: their numbers are unknown.
    problems = [f"{name}: {error}" for name, error in found.damaged.items() if name not in unusable]
    for error in found.damaged.values():
        claims().decided()
        unread = isinstance(error, StorageFailed) and (answers or not tells_nothing(error))
        if unread or (resumes and _may_be_sound(error)):
            raise error
    for _, name in found.numbered:
        if name in unusable:
            continue
        try:
            chain = resolve(root, name, known, names)
            _require_usable(chain, unusable)
        except CheckpointNotFound:
            logger.info("%s in %s was never committed", name, root)
            absent.add(name)
            continue
        except (CheckNRunError, OSError) as error:
            if isinstance(error, StorageUnreachable) or (answers and isinstance(error, OSError)):
                raise
            if resumes and _may_be_sound(error):
                raise
            claims().decided()  # not earlier: without any commit the run starts fresh in any case
            problems.append(f"{name}: {error}")
            continue
        claim = claims().decided()
        if claim is not None and chain.head.epoch > claim.epoch:
            require_claim(root, name, chain.head.epoch)
        if claim is None or claim.admits(name, chain.head.epoch):
            return chain, problems, absent
        problems.append(f"{name}: {IGNORED}: `checknrun adopt {root} {name}` makes it count")
    return None, problems, absent


def _require_usable(chain: Chain, unusable: Container[str]) -> None:
    """Refuse a chain with a checkpoint that can't be used.

    Raises:
        ChainBroken: names it.
    """
    for manifest in chain.manifests:
        if manifest.id in unusable:
            raise ChainBroken(f"it needs {manifest.id}, which can't be used")


def _may_be_sound(error: Exception) -> bool:
    """Return whether an error leaves open whether a checkpoint is sound: this process can't read
    it, or only a newer release can.
    """
    return tells_nothing(error) or isinstance(error, UnsupportedFormat)
