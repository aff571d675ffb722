"""Prune a root: delete checkpoints that no kept one needs, and leftovers of crashed saves.

``retention`` decides on checkpoints, ``deletion`` deletes them; this module takes care of other
writers.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial

from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
    StorageFailed,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, CheckpointId
from torchrec_checknrun.root.checkpoints import (
    Listing,
    committed,
    files_problem,
    find_forbidden,
    has_manifest,
    is_cut,
    read_manifest,
    sizes_of,
)
from torchrec_checknrun.root.counting import counting, counting_ids, highest_epoch
from torchrec_checknrun.root.deletion import (
    Deletion,
    delete_priority_saves,
    find_leftovers,
    with_parents,
)
from torchrec_checknrun.root.followers import delete_silent, held_by_followers
from torchrec_checknrun.root.lineage import parent_among
from torchrec_checknrun.root.retention import (
    PINNED,
    Retention,
    Verdict,
    is_pinned,
    judge,
    next_parents,
)
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import Claim, epochs, read_claims
from torchrec_checknrun.writers.lease import Lease
from torchrec_checknrun.writers.liveness import clean_up, require_no_newer, standing_of

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(manifest\.json|pinned)\.[0-9a-f]+")
"""Names under which a manifest or a pin is written before it takes its place."""


@dataclass(frozen=True)
class Pruned:
    """The result of a pruning, or of a dry run.

    Attributes:
        verdict: on the committed checkpoints.
        leftovers: directories of saves that were never committed.
        bytes: of the deleted checkpoints.
        problems: what could not be deleted, with the reason.
    """

    verdict: Verdict
    leftovers: tuple[str, ...]
    bytes: int
    problems: tuple[str, ...] = ()


def prune(
    root: Folder,
    retention: Retention,
    *,
    in_use: Collection[str] = (),
    copies_of: Collection[int] = (),
    own: Claim | None = None,
    still_ours: Callable[[], object] = lambda: None,
    below: int | None = None,
    known: MutableMapping[str, Manifest] | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Delete checkpoints that no kept one needs, and leftovers of failed saves.

    Args:
        in_use: ids that stay whatever the retention says.
        copies_of: sequence numbers whose compacted copies stay, too: one is being made.
        own: the claim of the writer that asks; None for a person, whose pruning leaves alone what
            a live writer may be working on, but also deletes checkpoints that replaced writers
            have committed and that readers therefore ignore.
        still_ours: raises an error once the writer that asks was replaced; called at each deletion
            of a checkpoint. A person's ends where the root is claimed meanwhile.
        below: delete only leftovers with lower sequence numbers; None for all, if no writer lives.
        known: manifests read by earlier calls; receives the ones that this call reads.

    Raises:
        RootInUse: the writer that asks was replaced, or a person's pruning met a new claim.
        IncompatibleCheckpoint: a person asks, and only checkpoints of replaced writers are whole;
            nothing was deleted.
        ClaimDamaged: which checkpoints count can't be told; nothing was deleted.
        CorruptCheckpoint: a pinned checkpoint's manifest is damaged, so that its parents are
            unknown; nothing was deleted.
        UnsupportedFormat: a checkpoint is of a newer release, so that its parents are unknown;
            nothing was deleted.
        StorageFailed: the storage refused; another pruning resumes where this one stopped.
    """
    claim, claims = _deciding_claim(root, own)
    known = {} if known is None else known
    plan = _plan(root, retention, (in_use, copies_of), own, claim, below, known)
    if not dry_run:
        if own is None:
            last = max(epochs(claims), default=0)
            if plan.leftovers and claim is not None:
                fenced = _fence(root, claim, last)
                if fenced is None:
                    plan.leftovers = ()
                else:
                    last = fenced
            still_ours = partial(require_no_newer, root, last)
        _carry_out(root, plan, claims, below, Deletion(root, known, still_ours))
    problems = tuple(dict.fromkeys(plan.problems))
    return Pruned(plan.verdict, plan.leftovers, plan.bytes, problems)


@dataclass
class _Plan:
    """The files that a pruning is about to delete.

    Attributes:
        found: the committed checkpoints, by id.
        temporary: files of killed processes in checkpoints, by id and name.
        unclear: directories that may be leftovers.
        leftovers: directories of saves that were never committed.
    """

    verdict: Verdict
    found: Mapping[str, Manifest]
    temporary: list[tuple[str, str]]
    unclear: dict[str, CheckpointId] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Return the bytes of the checkpoints to delete."""
        return sum(self.found[id].stored_bytes for id in self.verdict.delete)


def _plan(
    root: Folder,
    retention: Retention,
    in_use: tuple[Collection[str], Collection[int]],
    own: Claim | None,
    claim: Claim | None,
    below: int | None,
    known: MutableMapping[str, Manifest],
) -> _Plan:
    """Decide what to delete; arguments as in ``prune``, with the claim that decides.

    Args:
        in_use: ``in_use`` and ``copies_of``.
    """
    listing = Listing.of(root.names())
    names = set(listing.names)
    others_live = own is None and claim is not None and _may_live(root, claim)
    for id in known.keys() - names:
        del known[id]  # otherwise a long run's would grow
    found = list(counting(root, claim, listing, known))
    used = {*in_use[0]}
    used |= {id.name for id in listing.ids.values() if id.is_copy and id.sequence in in_use[1]}
    if claim is not None and (own is not None or others_live):
        used |= {*claim.uses, *next_parents(found, claim.epoch, copies=own is None)}
    used |= held_by_followers(root, {manifest.id: manifest.sequence for manifest in found})
    plan = _decide(root, retention, listing, found, known, used, by_person=own is None)
    if not others_live:
        unknown = listing.ids.keys() - plan.found.keys()
        needed = {id: by for id, by in _lost_parents(plan).items() if id in unknown}
        plan.problems += [
            f"{root}/{id} stays: {by} builds on it, so that it was committed, but it has no usable "
            f"{MANIFEST_NAME}: put that back from a copy of the root"
            for id, by in sorted(needed.items())
        ]
        newest = max((listing.ids[id].sequence for id in needed), default=0)
        # Any older one may be what the newest of them builds on: its manifest would tell.
        stay = needed.keys() | {id for id in unknown if listing.ids[id].sequence < newest}
        plan.unclear = {name: listing.ids[name] for name in sorted(unknown - stay - used)}
        of_none = find_leftovers(root, plan.unclear.values(), below, plan.problems)
        plan.leftovers = tuple(of_none)
    if plan.verdict.delete:
        _check_readable(root, listing.only(names - known.keys()), by_person=own is None)
    return plan


def _lost_parents(plan: _Plan) -> dict[str, str]:
    """Return parents that have no manifest any more and no copy in their place, by id, each with a
    checkpoint that counts, stays, and was built on it.
    """
    stays = [m for m in plan.found.values() if m.id not in plan.verdict.delete]
    orphans = [m for m in stays if m.parent is not None and not parent_among(m, plan.found)]
    return {m.parent.id: m.id for m in orphans if m.parent is not None}


def _decide(
    root: Folder,
    retention: Retention,
    listing: Listing,
    found: list[Manifest],
    known: MutableMapping[str, Manifest],
    used: set[str],
    *,
    by_person: bool,
) -> _Plan:
    """Decide on the committed checkpoints.

    Args:
        found: manifests of the checkpoints that count.
        used: ids that stay whatever the retention says.
        by_person: also decide on checkpoints that don't count.
    """
    apart = set(listing.names) - {manifest.id for manifest in found}
    others = [manifest for id, manifest in known.items() if id in apart]
    verdict = judge(found, retention, in_use=used, ignored=others, ids=listing.ids)
    temporary: list[tuple[str, str]] = []
    if verdict.delete or (others and by_person):  # otherwise pins and damage make no difference
        pinned, damaged, gone, temporary = _look(root, [*found, *others])
        for id in gone:  # deleted by another process since it was read, perhaps not to the end
            del known[id]
        found, others = [[m for m in ms if m.id not in gone] for ms in (found, others)]
        verdict = judge(found, retention, pinned, used, damaged, others, listing.ids)
        if by_person:
            _require_counting(root, [m for m in found if m.id not in damaged], others)
            stay = {*verdict.keep, *(m.id for m in found if m.id not in verdict.delete)}
            needed = with_parents(known, stay)
            ignored = {m.id: "of a replaced writer" for m in others if m.id not in needed}
            delete = {**ignored, **verdict.delete}
            if any(m.parent is not None and m.parent.id in ignored for m in found):
                # Some build on others: children, whose numbers are higher, go first.
                delete = dict(sorted(delete.items(), key=lambda it: -known[it[0]].sequence))
            verdict = Verdict(verdict.keep, delete)
    return _Plan(verdict, {m.id: m for m in [*found, *others]}, temporary)


def _carry_out(
    root: Folder, plan: _Plan, claims: Collection[str], below: int | None, delete: Deletion
) -> None:
    """Delete checkpoints and leftovers; leave in the plan the leftovers that are gone.

    Args:
        claims: the names in ``writers/``.

    Raises:
        StorageFailed: the storage refused a deletion.
    """
    for id in plan.verdict.delete:
        delete.checkpoint(id)
    gone: list[str] = []
    for name in plan.leftovers:
        # Looked at again: a save or a compaction may have gone on meanwhile.
        for still in find_leftovers(root, [plan.unclear[name]], below, plan.problems):
            gone += [name] if delete.leftover(still) else []
    plan.leftovers = tuple(gone)
    plan.problems += delete.odd
    if delete.failed:
        raise delete.failed[0]
    try:
        if plan.verdict.delete:
            delete_priority_saves(root)
            delete_silent(root, max(plan.found.values(), key=lambda m: m.sequence).id)
        clean_up(root, claims, others=plan.temporary)
    except StorageUnreachable:
        raise
    except StorageFailed as error:
        plan.problems.append(f"temporary files in {root} stay: {error}")


def _deciding_claim(root: Folder, own: Claim | None) -> tuple[Claim | None, Collection[str]]:
    """Return the latest claim, which decides what counts, and the names in ``writers/``.

    Raises:
        RootInUse: the writer that asks was replaced.
    """
    claims = read_claims(root)
    claim = claims.decided()
    if own is not None and (claim is None or claim.epoch < own.epoch):
        return own, claims.names  # a listing lags behind
    if own is not None and claim is not None and claim.epoch > own.epoch:
        raise RootInUse(f"{root} has another writer now, which decides what is deleted")
    return claim, claims.names


def _may_live(root: Folder, claim: Claim) -> bool:
    """Return whether a claim's holder may be at work; True where that can't be tested because the
    disk is full or read-only: certain deletions are possible nevertheless.
    """
    try:
        return not standing_of(root, claim).free
    except StorageUnreachable:
        raise
    except StorageFailed as error:
        logger.warning("unknown whether a writer is at work in %s: %s", root, error)
        return True


def _fence(root: Folder, claim: Claim, last: int) -> int | None:
    """Begin an epoch without a holder if the holder of the latest is only silent: should that
    process still live, it can no longer commit what is taken for a leftover. Return the last epoch
    then; None if the holder shows signs of life again.
    """
    if claim.released or claim.holder.gone:
        return last
    lease = Lease(root)
    above = highest_epoch(root)
    try:
        lease.acquire(lambda before: counting_ids(root, before), above=above, expected=claim.epoch)
    except RootInUse as error:
        logger.warning("leftovers of failed saves stay: %s", error)
        return None
    epoch = lease.claim.epoch
    lease.release()
    return epoch


def _require_counting(root: Folder, whole: list[Manifest], others: list[Manifest]) -> None:
    """Refuse to delete checkpoints of replaced writers if no other could be restored.

    Raises:
        IncompatibleCheckpoint: names the newest.
    """
    if others and not whole:
        newest = max(others, key=lambda manifest: manifest.sequence).id
        raise IncompatibleCheckpoint(
            f"nothing is deleted from {root}: it holds {len(others)} checkpoint(s) that replaced "
            f"writers have committed, and no other that could be restored. `checknrun adopt {root} "
            f"{newest}` makes the newest one count"
        )


def _check_readable(root: Folder, listing: Listing, *, by_person: bool) -> None:
    """Refuse to delete anything if a checkpoint that must stay has unknown parents.

    Args:
        by_person: also refuse where there may be such a checkpoint, of a user's naming. A run's own
            retention goes on: its checkpoints have names of this package's.

    Raises:
        UnsupportedFormat: it is of a newer release.
        CorruptCheckpoint: it is pinned, and its manifest is damaged.
        StorageFailed: this process may not look into a directory that may be one.
    """
    for problem in find_forbidden(root, listing) if by_person else ():
        raise StorageFailed(
            errno.EACCES,
            f"nothing is deleted from {root}: a checkpoint that needs it may be in {problem}. Let "
            "this user read that directory, or move it out of the root",
        )
    for name in committed(root, listing):
        try:
            read_manifest(root, name)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"nothing is deleted from {root}: {error}") from error
        except CheckNRunError as error:
            # A pin keeps also what can't be restored, and its parents.
            if PINNED in (root / name).names():
                raise CorruptCheckpoint(
                    f"nothing is deleted from {root}: {name} is pinned, but the checkpoints that "
                    f"it needs are unknown, since its manifest can't be read: {error}. Repair the "
                    f"manifest, or run `checknrun unpin {root} {name}`"
                ) from error


def _look(
    root: Folder, found: Iterable[Manifest]
) -> tuple[set[str], set[str], set[str], list[tuple[str, str]]]:
    """Return the ids of checkpoints that are pinned, damaged (files of another size), and deleted
    meanwhile; and temporary files, by id and name.
    """
    pinned, damaged, gone = set[str](), set[str](), set[str]()
    temporary: list[tuple[str, str]] = []
    for manifest in found:
        files = sizes_of(root, manifest)
        if MANIFEST_NAME not in files and not has_manifest(root, manifest.id):
            gone.add(manifest.id)
            continue
        if is_pinned(root / manifest.id):
            pinned.add(manifest.id)
        temporary += [(manifest.id, name) for name in files if _TEMPORARY.fullmatch(name)]
        if files_problem(manifest, files) is not None or is_cut(root, manifest, files):
            damaged.add(manifest.id)
    return pinned, damaged, gone, temporary
