"""Keep copies of each rank's files in another rank's shared memory, and bring them back from there.

What was encoded for a checkpoint is copied into this machine's memory while it is written, and sent
to the holder once the checkpoint is committed: the holder has the baseline and chain of each rank
whose copies it holds. A copy counts only with the manifest in the storage, as the file there does.
All of this is an extra: whatever fails here, a checkpoint is committed, and a restore reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.rank_file import rank_file_name
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.partial import PeerCopies
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.shared_memory.space import require_space
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.copies_folder import CopiesFolder
from torchrec_checknrun.tiers.exchange import Move, exchange
from torchrec_checknrun.tiers.outgoing import INDEXES, OutgoingCopies, logger
from torchrec_checknrun.tiers.peer_tier import IncomingCopy, PeerTier
from torchrec_checknrun.tiers.placement import holders, machine_of
from torchrec_checknrun.tiers.tier import NotHeld

T = TypeVar("T")


class Own(NamedTuple):
    """The message of a rank to the others at the start.

    Attributes:
        machine: what is lost together with this rank.
        shards: a digest of its shards: copies of others don't fit.
        bytes: of its tables with optimizer state, and of everything else.
    """

    machine: tuple[str, int, int]
    shards: str
    bytes: int


class Offer(NamedTuple):
    """A rank's file of a checkpoint, for its holder.

    Attributes:
        id: of the checkpoint.
        chain: ids of those that it builds on.
        size: of the file in bytes.
    """

    id: str
    chain: tuple[str, ...]
    size: int


def make_peers(
    wanted: PeerCopies | None, image: RankImage | None, ranks: Ranks, background: Ranks, bytes: int
) -> Peers | None:
    """Make the copies of all ranks; None where none are wanted, or there is nobody to have them.

    A collective. Must not fail on one rank alone.

    Args:
        bytes: of this rank's tables with optimizer state, and of everything else.
    """
    if wanted is None or image is None:
        return None
    digest = hashlib.sha256(image.shards.digest.encode()).hexdigest()[:16]
    own = ranks.gather(Own(machine_of(image.path.parent), digest, bytes))
    machines = [one.machine for one in own]
    if ranks.rank == 0 and len(set(machines)) == 1:
        logger.warning(
            "all ranks share one machine's memory: peer copies are lost together with it, and help "
            "only where single images are gone"
        )
    largest = max(one.bytes for one in own) + INDEXES
    most = 2 * largest if wanted.most_bytes is None else wanted.most_bytes
    if ranks.world_size == 1:
        return None
    return Peers(CopiesFolder(image.path), own, holders(machines), most, ranks, background)


class Peers(OutgoingCopies):
    """The copies of this rank's files, and those of others that it holds.

    Args:
        own: what each rank has told.
        holder_of: by rank, whose memory holds its copies.
        most: bytes that a rank holds for others.
        ranks, background: as the training thread and the background reach the others.
    """

    def __init__(
        self,
        folder: CopiesFolder,
        own: Sequence[Own],
        holder_of: Sequence[int],
        most: int,
        ranks: Ranks,
        background: Ranks,
    ) -> None:
        super().__init__(
            folder,
            ranks.rank,
            full_bytes=own[ranks.rank].bytes + INDEXES,
            most=most,
            missing="peer copies are missing, and would be read from the storage",
        )
        self._own, self._holders = own, holder_of
        self._ranks, self._background = ranks, background

    # ------------------------------------------------------------------ saving

    def committed(self, manifest: Manifest) -> None:
        """Send the copy of a committed checkpoint to its holder; a collective of the background."""
        try:
            self._send(manifest)
        except Exception as error:
            self._tell(f"they could not be exchanged: {error!r}")
        finally:
            self.folder.empty_outbox()

    def _send(self, manifest: Manifest) -> None:
        own = self._tried(lambda: self._offer(manifest), None)
        offers = dict(enumerate(self._background.gather(own)))
        incoming = {
            owner: offer
            for owner, offer in offers.items()
            if offer is not None and self._holders[owner] == self._rank
        }
        copies = {
            owner: self._tried(partial(self._accept, owner, offer), None)
            for owner, offer in incoming.items()
        }
        taken = self._background.gather([owner for owner, copy in copies.items() if copy])
        moves = [
            Move(owner, holder, offer.size)
            for owner, (offer, holder) in enumerate(
                zip(offers.values(), self._holders, strict=True)
            )
            if offer is not None and owner in taken[holder]
        ]
        outbox = self.folder.outbox(self._rank)

        def write(move: Move, piece: memoryview) -> None:
            _write(copies, move.source, piece, lambda why: self._drop(move.source, why))

        exchange(
            self._background, moves, lambda _, at, size: outbox.read(self._id, at, size), write
        )
        for owner, copy in copies.items():
            if copy is not None:
                copy.keep()
                self._held(owner).keep_only([*incoming[owner].chain, manifest.id])

    def _offer(self, manifest: Manifest) -> Offer | None:
        """Return what this rank has to send; None without a whole copy."""
        name = rank_file_name(self._rank)
        size = next((file.size for file in manifest.files if file.name == name), None)
        whole = self.folder.outbox(self._rank).sizes().get(manifest.id) == size
        return Offer(manifest.id, self._chain, size) if whole and size is not None else None

    def _accept(self, owner: int, offer: Offer) -> IncomingCopy | None:
        """Begin a copy if there is room, and the chain that it belongs to."""
        held = self._held(owner)
        if not set(offer.chain) <= held.sizes().keys():
            held.keep_only([])
            self._tell("they begin with the next full checkpoint: the chain before is not there")
            return None
        if self.folder.held_bytes + offer.size > self._most:
            held.keep_only(offer.chain)  # what it replaces goes first: an old chain, for example
        try:
            if (total := self.folder.held_bytes + offer.size) > self._most:
                raise ImagesRefused(f"{total:,} bytes are more than most_bytes={self._most:,}")
            self.folder.make()
            require_space(self.folder.path, offer.size)
            return held.receive(offer.id)
        except (OSError, ImagesRefused) as error:
            self._drop(owner, str(error))
            return None

    def _drop(self, owner: int, why: str) -> None:
        """Hold nothing of a rank until its next full checkpoint."""
        self._tell(f"there is no room for those of rank {owner}: {why}")
        self._held(owner).keep_only([])

    def _held(self, owner: int) -> PeerTier:
        return self.folder.held(owner, self._own[owner].shards)

    # ------------------------------------------------------------------ recovery

    def fetch(self, chain: Chain, lost: Sequence[int]) -> tuple[int, ...]:
        """Bring lost ranks the copies of their files, where others hold all of a chain; a
        collective of the training thread.

        Returns:
            The lost ranks that have theirs in ``fetched`` now, unverified.
        """
        self.folder.forget_fetched()
        sizes = {
            owner: self._tried(partial(self._sizes, owner, chain), list[int]())
            for owner in lost
            if self.folder.is_safe
        }
        held = self._ranks.gather(sizes)
        sources = {
            owner: next((rank for rank, of_rank in enumerate(held) if of_rank.get(owner)), None)
            for owner in lost
        }
        whole = sources.get(self._rank) is not None
        for number, manifest in enumerate(chain.manifests):
            moves = [
                Move(source, owner, held[source][owner][number])
                for owner, source in sources.items()
                if source is not None
            ]
            whole &= self._receive(manifest.id, moves)
        return tuple(rank for rank, has in enumerate(self._ranks.gather(whole)) if has)

    @property
    def fetched(self) -> Folder:
        """Return the copies that ``fetch`` has brought, as a root without manifests."""
        return Folder(self.folder.fetched_path)

    def _sizes(self, owner: int, chain: Chain) -> list[int]:
        """Return the bytes of a rank's files of a chain; empty unless all are here, and sound."""
        held, name = self._held(owner), rank_file_name(owner)
        sizes = held.sizes()
        found = []
        for manifest in chain.manifests:
            wanted = next((file.size for file in manifest.files if file.name == name), None)
            if wanted is None or sizes.get(manifest.id) != wanted:
                return []
            found.append(wanted)
        try:
            for manifest in chain.manifests:
                held.verify(manifest.id)
        except NotHeld as error:
            self._tell(f"the copy of rank {owner} is damaged: {error}")
            return []
        return found

    def _receive(self, id: str, moves: Sequence[Move]) -> bool:
        """Move one checkpoint's files; return whether this rank got its own."""
        copies: dict[int, IncomingCopy | None] = {}
        if any(move.target == self._rank for move in moves):
            try:
                self.folder.make()
                copies[self._rank] = self.folder.fetched(self._rank).receive(id)
            except OSError as error:
                self._tell(f"this rank's can't be fetched: {error}")

        def read(move: Move, at: int, size: int) -> bytes:
            return self._held(move.target).read(id, at, size)

        def write(_: Move, piece: memoryview) -> None:
            _write(copies, self._rank, piece, lambda why: self._tell(f"no room to fetch: {why}"))

        exchange(self._ranks, moves, read, write)
        copy = copies.get(self._rank)

        def keep() -> bool:
            if copy is not None:
                copy.keep()
            return copy is not None

        return self._tried(keep, False)

    # ------------------------------------------------------------------

    def _tried(self, act: Callable[[], T], otherwise: T) -> T:
        """Do a part of an exchange, or tell why it failed: the other ranks wait for this one, and
        are not to be left alone with the rest.
        """
        try:
            return act()
        except Exception as error:
            self._tell(f"they could not be exchanged: {error!r}")
            return otherwise


def _write(
    copies: dict[int, IncomingCopy | None], at: int, piece: memoryview, tell: Callable[[str], None]
) -> None:
    """Append bytes to one of several copies; give the copy up where that fails. Must not fail."""
    copy = copies.get(at)
    if copy is None:
        return
    try:
        copy.write(piece)
    except OSError as error:
        copies[at] = None
        with suppress(OSError):
            copy.drop()
        with suppress(OSError):
            tell(str(error))
