"""Apply a person's decisions on a root: revoke a writer's right, choose which checkpoints count.

Each decision is a new epoch whose claim no process holds: the claim lists the checkpoints that
count, and holders of earlier epochs commit nothing more. Until the claim has its list, the previous
one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    CorruptCheckpoint,
    RootInUse,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.counting import counting_ids, highest_epoch
from torchrec_checknrun.root.retention import PINNED, write_pin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.control_records import Damage, find_damage
from torchrec_checknrun.writers.claims import (
    FOLDER,
    LEASE_SECONDS,
    Claim,
    Claims,
    read_claims,
)
from torchrec_checknrun.writers.lease import Lease
from torchrec_checknrun.writers.liveness import clean_up, is_fresh, standing_of


def repair(root: Folder, ignore: Collection[str] = (), *, expected: int | None = None) -> Damage:
    """Settle which checkpoints count where a damaged claim can't tell, and rewrite damaged pins.

    Without the damaged claim the previous one decides, if it is still there; else all checkpoints
    count. So no checkpoint that counted is lost, but late commits of a replaced writer may count as
    well.

    Args:
        ignore: ids of checkpoints that must not count.
        expected: the highest claimed epoch at the time of the decision.

    Returns:
        The damage found.

    Raises:
        RootInUse: the damaged claim was just written, perhaps by a live writer; or there is a new
            claim since the decision.
        CheckpointNotFound: there is no checkpoint of an id to ignore.
        ClaimDamaged: this process can't read a claim that may be sound; nothing was changed.
        CorruptCheckpoint: some pins can't be rewritten, or claims not removed; everything else is
            repaired.
        StorageFailed: the storage refused.
    """
    damage = find_damage(root)
    read_claims(root).require_readable()
    _require_same(root, damage.highest, expected)
    for id in set(ignore) - damage.will_count.keys():
        raise CheckpointNotFound(f"no committed checkpoint {id!r} in {root}: see `checknrun ls`")
    if damage.undecided is not None or ignore:
        claims = read_claims(root)
        for name in claims.undecided:
            if is_fresh(root, name, watch=True):
                raise RootInUse(
                    f"{root}/{FOLDER}/{name} was written less than {LEASE_SECONDS:.0f} s ago: a "
                    "live writer rewrites it by itself; try again in a minute"
                )
        if not claims.undecided:
            _require_free(root, claims.latest)

        def counting() -> list[str]:
            will_count = find_damage(root).will_count
            return [id for id, counts in will_count.items() if counts and id not in ignore]

        _advance(root, claims, counting)
    stay = _rewrite(root, damage.pins)
    clean_up(root, (root / FOLDER).names())
    if stay:
        raise CorruptCheckpoint(
            f"everything in {root} is repaired but what can't be rewritten or removed: "
            f"{'; '.join(stay)}. Remove these by hand; pins among them keep their checkpoints: "
            "`checknrun pin` these again"
        )
    return damage


def _rewrite(root: Folder, pins: Iterable[str]) -> list[str]:
    """Remove damaged claims, which decide nothing any more, and rewrite the pins of checkpoints;
    return what stays, with the reason.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    stay: list[str] = []
    claims = read_claims(root, every=True)
    for name in sorted(claims.damaged.keys() - claims.forbidden):
        try:
            (root / FOLDER).delete(name)
        except StorageUnreachable:
            raise
        except StorageFailed as error:  # perhaps a directory
            stay.append(f"{FOLDER}/{name}: {error}")
    for id in pins:
        try:
            write_pin(root, id)
        except (CheckNRunError, StorageFailed) as error:
            if isinstance(error, StorageUnreachable):
                raise
            stay.append(f"{id}/{PINNED}: {error}")
    return stay


def adopt(root: Folder, ids: Collection[str], *, dry_run: bool = False) -> list[str]:
    """Make checkpoints count that don't, since their writer had been replaced.

    Args:
        dry_run: look, and change nothing.

    Returns:
        The ids that count now and didn't before.

    Raises:
        CheckpointNotFound, ChainBroken, CorruptCheckpoint: a checkpoint can't be restored.
        ClaimDamaged: which checkpoints count can't be told: call ``repair`` first.
        RootInUse: a writer is at work.
    """
    for id in ids:
        resolve(root, id)
    claims = read_claims(root)
    claims.decided()
    there = set(counting_ids(root, claims.latest))
    new = [id for id in dict.fromkeys(ids) if id not in there]
    if new and not dry_run:
        _require_free(root, claims.latest)
        _advance(root, claims, lambda: [*counting_ids(root, claims.latest), *new])
        for id in new:  # a pruning that had seen the claim before may have deleted it meanwhile
            resolve(root, id)
    return new


def unlock(root: Folder, *, expected: int | None = None) -> None:
    """Revoke the right to commit from the process that holds it, alive or not.

    Args:
        expected: the epoch at the time of the decision; None: whichever is the latest.

    Raises:
        ClaimDamaged: the claim can't be read: call ``repair`` first.
        RootInUse: there is a new claim since the decision.
    """
    claims = read_claims(root)
    claims.decided()
    _require_same(root, claims.highest, expected)
    _advance(root, claims, lambda: list(counting_ids(root, claims.latest)))


def restores(root: Folder) -> str:
    """Describe a restore's present choice in a sentence."""
    chain, problems = newest(root)
    if chain is not None:
        return f"a restore takes {chain.head.id} (step {chain.head.step})"
    return f"a restore fails: {'; '.join(problems)}" if problems else "a restore is a fresh start"


def _require_free(root: Folder, claim: Claim | None) -> None:
    if claim is None:
        return
    standing = standing_of(root, claim)
    if not standing.free:
        raise RootInUse(
            f"{root} is written to by {claim.holder}, which {standing.why}: end that process "
            f"first, or revoke its right with `checknrun unlock {root}`"
        )


def _require_same(root: Folder, highest: int, expected: int | None) -> None:
    if expected is not None and highest != expected:
        raise RootInUse(
            f"{root} was claimed by another writer meanwhile: nothing was changed; look again"
        )


def _advance(root: Folder, claims: Claims, counting: Callable[[], Iterable[str]]) -> None:
    """Begin an epoch that no process holds, after the claims at the time of the decision.

    Raises:
        RootInUse: there is a new claim since.
    """
    lease = Lease(root)
    above = max(claims.highest, highest_epoch(root))
    lease.acquire(lambda _: counting(), above=above, force=True, expected=claims.highest)
    lease.release()
