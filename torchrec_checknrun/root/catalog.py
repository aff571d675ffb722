"""List the checkpoints of a root, each with its status and size.

From manifests and file names alone: no tensor is read, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    ClaimDamaged,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.chain import incompatibility
from torchrec_checknrun.root.checkpoints import (
    committed,
    describe_empty,
    files_problem,
    read_manifest,
)
from torchrec_checknrun.root.lineage import copy_among, parent_among
from torchrec_checknrun.root.retention import abandoned_ids, is_pinned
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import at_once
from torchrec_checknrun.writers.claims import FOLDER, Claim, Claims, read_claims, require_claim
from torchrec_checknrun.writers.liveness import seems_alive

Status = Literal["restorable", "abandoned", "ignored", "undecided", "broken", "uncommitted"]
"""The use of a checkpoint:

- restorable: a restore may choose it;
- abandoned: on a fork from which the run did not go on;
- ignored: committed by a writer that had been replaced;
- undecided: only a damaged claim tells whether it counts;
- broken: files are missing, or a checkpoint of its chain is;
- uncommitted: without a manifest, and no checkpoint builds on it.
"""


@dataclass(frozen=True)
class Listed:
    """One directory of a root.

    Attributes:
        manifest: None if there is none, or none that can be read.
        chain: ids of the checkpoints that a restore reads, oldest first; empty if broken.
        bytes: of all files in the directory.
        chain_bytes: of all files of the chain.
        problem: why the checkpoint is broken.
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
        claim: of the last writer.
        alive: whether that writer is probably at work.
        problems: what is wrong with the claims.
    """

    checkpoints: tuple[Listed, ...]
    claim: Claim | None
    alive: bool = False
    problems: tuple[str, ...] = ()


@dataclass
class _Content:
    """The directories of checkpoints in a root, as read.

    Attributes:
        files: by id, the sizes of all files in the directory.
        manifests: by id, the manifests that can be read.
        problems: by id, why a directory or its files can't be used.
    """

    files: dict[str, Mapping[str, int]] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def inventory(root: Folder) -> Inventory:
    """Look at every checkpoint of a root: one listing and one small file for each.

    Raises:
        CheckpointNotFound: there is none, committed or not.
        StorageFailed: the storage doesn't answer.
    """
    claims = read_claims(root, every=True)
    ids = committed(root)
    if not ids:
        raise CheckpointNotFound(
            f"no checkpoints: {describe_empty(root)}. Name the folder or URL that was given to "
            "Checkpointer"
        )
    content = _read(root, ids)
    lost = _lost_claim(root, claims, content.manifests)
    counts = _counts(claims, ids, content.manifests, lost[0] if lost is not None else None)
    counting = {id: m for id, m in content.manifests.items() if counts[id] is not False}
    ignored = (m for id, m in content.manifests.items() if id not in counting)
    abandoned = abandoned_ids(counting.values(), content.problems, ignored)
    listed, chains = [], _chains(content)
    for id in ids:
        status: Status = "restorable"
        if id not in content.manifests:
            status = "uncommitted"
        elif id not in counting:
            status = "ignored"
        elif counts[id] is None:
            status = "undecided"
        elif id in abandoned:
            status = "abandoned"
        listed.append(_listed(root, id, status, content, chains))
    return Inventory(
        tuple(listed),
        claims.latest,
        claims.latest is not None and seems_alive(root, claims.latest),
        (
            *(f"{FOLDER}/{name}: {what}" for name, what in claims.damaged.items()),
            *((lost[1],) if lost is not None else ()),
        ),
    )


def _read(root: Folder, ids: Sequence[str]) -> _Content:
    """Read manifests and file sizes.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    content = _Content()
    looks = at_once([partial(_look, root, id) for id in ids], "checknrun-catalog")
    for id, (files, manifest, problem) in zip(ids, looks, strict=True):
        content.files[id] = files
        if manifest is not None:
            content.manifests[id] = manifest
        if problem is not None:
            content.problems[id] = problem
    for child in content.manifests.values():
        parent = child.parent
        if parent is None or parent_among(child, content.manifests) is not None:
            continue
        if parent.id in content.files.keys() - content.problems.keys():
            content.problems[parent.id] = (
                f"{MANIFEST_NAME} is missing, but {child.id} builds on it: put that file back from "
                "a copy of the root"
            )
    return content


def _look(root: Folder, id: str) -> tuple[Mapping[str, int], Manifest | None, str | None]:
    """Return the sizes of a directory's files, its manifest, and why it can't be used.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    files: Mapping[str, int] = {}
    try:
        files = (root / id).sizes()
        # Links and pipes aren't among the files; reading one raises a precise error.
        if MANIFEST_NAME not in files and MANIFEST_NAME not in (root / id).names():
            return files, None, None
        manifest = read_manifest(root, id)
    except (CheckNRunError, StorageFailed) as error:
        if isinstance(error, StorageUnreachable):
            raise
        return files, None, str(error)
    return files, manifest, files_problem(manifest, files)


def _lost_claim(
    root: Folder, claims: Claims, manifests: Mapping[str, Manifest]
) -> tuple[str, str] | None:
    """Return the newest checkpoint whose claim was deleted, and the remedy."""
    for id, manifest in manifests.items():
        if claims.latest is not None and manifest.epoch > claims.highest:
            try:
                require_claim(root, id, manifest.epoch)
            except ClaimDamaged as error:
                return id, str(error)
    return None


def _counts(
    claims: Claims, ids: Sequence[str], manifests: Mapping[str, Manifest], lost: str | None
) -> dict[str, bool | None]:
    """Return by id whether a checkpoint counts; None if that can't be told.

    Args:
        lost: the newest checkpoint whose claim was deleted: nothing tells whether it, or an older
            one, counts.
    """
    counts = {id: claims.counts(id, manifest.epoch) for id, manifest in manifests.items()}
    if lost is not None:
        counts |= {id: None for id in ids[ids.index(lost) :] if counts.get(id)}
    return counts


def _listed(root: Folder, id: str, status: Status, content: _Content, chains: _Chains) -> Listed:
    manifest, files = content.manifests.get(id), content.files[id]
    problem = content.problems.get(id)
    chain = _NO_CHAIN
    if manifest is not None:
        chain = chains[id]
        problem = problem or chain.problem
    if problem is not None:
        status, chain = "broken", _NO_CHAIN
    return Listed(
        id=id,
        status=status,
        manifest=manifest,
        chain=chain.ids,
        chain_bytes=chain.bytes,
        bytes=sum(files.values()),
        pinned=bool(files) and is_pinned(root / id),
        problem=problem,
    )


@dataclass(frozen=True)
class _FoundChain:
    """The checkpoints that a restore of one reads, oldest first, or what is wrong with one."""

    ids: tuple[str, ...] = ()
    bytes: int = 0
    problem: str | None = None

    def and_then(self, id: str, content: _Content) -> _FoundChain:
        """Return the chain that one more checkpoint ends."""
        return _FoundChain((*self.ids, id), self.bytes + sum(content.files[id].values()))


_NO_CHAIN = _FoundChain()
_Chains = Mapping[str, _FoundChain]


def _chains(content: _Content) -> _Chains:
    """Find the chains of all checkpoints: each is what its parent's is, and one more."""
    sound = {id: m for id, m in content.manifests.items() if id not in content.problems}
    chains: dict[str, _FoundChain] = {}
    for child in sorted(content.manifests.values(), key=lambda manifest: manifest.sequence):
        before = _NO_CHAIN
        if child.parent is not None:
            parent = parent_among(child, sound)
            problem = _problem(child, child.parent.id, parent, content)
            before = _FoundChain(problem=problem)
            if problem is None and parent is not None:
                before = chains[parent.id]  # its number is lower
            if before.problem and (copy := copy_among(child, sound.values())) is not None:
                before = _NO_CHAIN.and_then(copy.id, content)
        chains[child.id] = before if before.problem else before.and_then(child.id, content)
    return chains


def _problem(child: Manifest, id: str, parent: Manifest | None, content: _Content) -> str | None:
    """Return why a checkpoint can't build on the parent that was found, if any; None if it can."""
    if parent is not None:
        return incompatibility(child, parent)
    if id in content.manifests:
        return f"it needs {id}, which is damaged: {content.problems[id]}"
    unread = id in content.problems
    why = f"can't be read: {content.problems[id]}" if unread else "is missing"
    return f"{child.id} needs {id}, which {why}"
