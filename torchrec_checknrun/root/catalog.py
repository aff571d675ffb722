"""What a root holds, checkpoint by checkpoint, and what each of them is good for.

From manifests and file names alone: no tensor is read, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    ClaimDamaged,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import MANIFEST_NAME, Manifest
from torchrec_checknrun.root.chain import committed, incompatibility, read_manifest
from torchrec_checknrun.root.claims import FOLDER, Claim, Claims, read_claims, require_claim
from torchrec_checknrun.root.liveness import seems_alive
from torchrec_checknrun.root.retention import abandoned_ids, is_pinned
from torchrec_checknrun.store.folder import Folder

Status = Literal["restorable", "abandoned", "ignored", "undecided", "broken", "uncommitted"]
"""A restore can choose it; is on a fork that was left behind; comes from a writer that had been
replaced; only a damaged claim tells whether it counts; misses files, or what it builds on; has no
manifest.
"""


@dataclass(frozen=True)
class Listed:
    """One directory of a root.

    Attributes:
        manifest: None if there is none that can be read.
        chain: ids of what a restore reads, oldest first; empty if that isn't all there.
        bytes: of all files in the directory.
        chain_bytes: the same of the whole chain.
        problem: why it is broken.
    """

    id: str
    status: Status
    manifest: Manifest | None
    chain: tuple[str, ...]
    chain_bytes: int
    bytes: int
    pinned: bool
    problem: str | None


@dataclass(frozen=True)
class Inventory:
    """All directories of checkpoints, newest first.

    Attributes:
        claim: of the writer that wrote there last.
        alive: whether that writer is probably at work.
        problems: what is wrong with the claims.
    """

    checkpoints: tuple[Listed, ...]
    claim: Claim | None
    alive: bool = False
    problems: tuple[str, ...] = ()


def inventory(root: Folder) -> Inventory:
    """Looks at every checkpoint of a root: one listing and one small file for each.

    Raises:
        CheckpointNotFound: there is none, committed or not.
        StorageFailed: the storage doesn't answer.
    """
    claims = read_claims(root, every=True)
    ids = committed(root)
    if not ids:
        raise CheckpointNotFound(
            f"no checkpoints in {root}: name the folder or URL that was given to Checkpointer"
        )
    manifests: dict[str, Manifest] = {}
    problems: dict[str, str] = {}
    files: dict[str, dict[str, int]] = {}
    for id in ids:
        files[id] = {}
        try:
            files[id] = (root / id).sizes()
            # Links aren't among the files; reading one says what is wrong with it.
            if MANIFEST_NAME not in files[id] and not (root / id).is_link(MANIFEST_NAME):
                continue
            manifests[id] = read_manifest(root, id)
        except (CheckNRunError, StorageFailed) as error:
            if isinstance(error, StorageUnreachable):
                raise
            problems[id] = str(error)
            continue
        problem = _files_problem(manifests[id], files[id])
        if problem is not None:
            problems[id] = problem
    counts = {id: claims.counts(id, manifest.epoch) for id, manifest in manifests.items()}
    lost = _lost_claim(root, claims, manifests)
    if lost is not None:  # nothing tells of it, nor of what is older, whether it counts
        older = ids[ids.index(lost[0]) :]
        counts |= {id: None for id in older if counts.get(id)}
    counting = {id: manifest for id, manifest in manifests.items() if counts[id] is not False}
    abandoned = abandoned_ids(counting.values(), problems)
    found = []
    for id in ids:
        manifest, own = manifests.get(id), files[id]
        chain: list[Manifest] = []
        problem = problems.get(id)
        status: Status = "uncommitted"
        if manifest is not None:
            chain, broken = _chain(manifest, manifests, problems)
            problem = problem or broken
            status = "restorable"
            if id not in counting:
                status = "ignored"
            elif counts[id] is None:
                status = "undecided"
            elif id in abandoned:
                status = "abandoned"
        if problem is not None:
            status, chain = "broken", []
        found.append(
            Listed(
                id=id,
                status=status,
                manifest=manifest,
                chain=tuple(m.id for m in chain),
                chain_bytes=sum(sum(files[m.id].values()) for m in chain),
                bytes=sum(own.values()),
                pinned=bool(own) and is_pinned(root / id),
                problem=problem,
            )
        )
    return Inventory(
        tuple(found),
        claims.latest,
        claims.latest is not None and seems_alive(root, claims.latest),
        (
            *(f"{FOLDER}/{name}: {what}" for name, what in claims.damaged.items()),
            *((lost[1],) if lost is not None else ()),
        ),
    )


def _lost_claim(
    root: Folder, claims: Claims, manifests: Mapping[str, Manifest]
) -> tuple[str, str] | None:
    """Return the newest checkpoint whose claim was deleted, and what to do about it."""
    for id, manifest in manifests.items():
        if claims.latest is not None and manifest.epoch > claims.highest:
            try:
                require_claim(root, id, manifest.epoch)
            except ClaimDamaged as error:
                return id, str(error)
    return None


def _files_problem(manifest: Manifest, files: Mapping[str, int]) -> str | None:
    for file in manifest.files:
        size = files.get(file.name)
        if size != file.size:
            found = "is missing" if size is None else f"has {size}"
            return f"{file.name} should have {file.size} bytes and {found}"
    return None


def _chain(
    head: Manifest, manifests: Mapping[str, Manifest], problems: Mapping[str, str]
) -> tuple[list[Manifest], str | None]:
    """The chain, oldest first, and what is wrong with what the head needs."""
    chain = [head]
    while (link := chain[-1].parent) is not None:
        parent = manifests.get(link.id)
        if parent is None:
            why = f"can't be read: {problems[link.id]}" if link.id in problems else "is missing"
            return [], f"{chain[-1].id} needs {link.id}, which {why}"
        problem = incompatibility(chain[-1], parent)
        if problem is not None:
            return [], problem
        if link.id in problems:
            return [], f"it needs {link.id}, which is damaged: {problems[link.id]}"
        chain.append(parent)
    return chain[::-1], None
