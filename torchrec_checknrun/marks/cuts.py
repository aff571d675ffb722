"""Take marks away at one instant for a checkpoint, and give them back if the checkpoint fails."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchrec_checknrun.marks.layers import Consumer, Selected, Share
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.ranks import listed

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Cut:
    """Marks taken away at one instant, kept until their rows are known to be durable.

    Attributes:
        number: position among the tracked model's cuts, the same on all ranks.
        consumers: the consumers whose marks were taken.
        shares: by each shard's marks, what was taken.
    """

    number: int
    consumers: Consumer
    shares: dict[Marks, Share] = field(default_factory=dict)

    def selected(self, marks: Marks, since: Consumer) -> Selected:
        """Return one shard's rows that were marked for a consumer at the cut, to be united.

        The rows stay the same, whatever becomes of the cut.
        """
        return self.shares[marks].selected(int(since))

    def bytes(self, marks: Marks) -> torch.Tensor:
        """Return one shard's marks as they were taken, ``(rows,)`` uint8."""
        again = torch.zeros(marks.rows, dtype=torch.uint8, device=marks.device)
        if marks in self.shares:
            for layer, bits in self.shares[marks].taken():
                layer.add_to(again, bits)
        return again

    def move(self, gone: Iterable[Marks], new: Mapping[Marks, torch.Tensor]) -> None:
        """Replace the rows of old shards by those of new ones.

        Args:
            gone: marks of the old shards.
            new: by the new shards' marks, bytes as ``bytes`` returns them, which become the cut's.
        """
        for marks in gone:
            self.shares.pop(marks, None)
        for marks, taken in new.items():
            share = self.shares[marks] = Share(int(self.consumers))
            marks.adopt(taken, share)

    def consolidate(self) -> None:
        """Make the shards' marks small, and ready for the next cut; see ``Marks.consolidate``."""
        for marks in list(self.shares):  # a reshard may change them meanwhile
            marks.consolidate()


class Cuts:
    """The cuts of a tracked model whose rows are not durable yet.

    Held weakly: marks of a cut that its owner has dropped are never given back, and need not follow
    their shards.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Cut] = weakref.WeakSet()
        self._made = 0
        self._warned = False

    def __iter__(self) -> Iterator[Cut]:
        return iter(self._open)

    def take(self, shards: Sequence[Marks], consumers: Consumer) -> Cut:
        """Take the consumers' marks of all shards away; leave them in place on failure."""
        self._made += 1
        self._mark_untold(shards)
        cut = Cut(self._made, consumers)
        self._open.add(cut)
        bits = int(consumers)
        try:
            for marks in shards:
                share = cut.shares[marks] = Share(bits)
                marks.cut(share)
            return cut
        except BaseException:
            self.merge(cut)
            raise

    def _mark_untold(self, shards: Sequence[Marks]) -> None:
        """Mark all rows of all shards, if rows of any changed that nothing told of."""
        samples = ((marks.untouched, marks.live) for marks in shards if marks.untouched is not None)
        found = [sample.table for sample, live in samples if sample.changed(live)]
        if not found:
            return
        for marks in shards:
            marks.mark_all()
        if not self._warned:
            self._warned = True
            logger.warning(
                "rows of %s changed that no lookup touched, and no write that PyTorch counts (they "
                "were written through .data or NumPy, by a collective, or by a kernel of the "
                "program's own): all rows of all tables count as modified in this checkpoint. This "
                "is noticed by a sample of rows, so that another time it may not be: write them "
                "inside `with checkpointer.writing(table, rows):`, or name them by mark() before",
                listed(sorted(set(found))),
            )

    def merge(self, cut: Cut) -> None:
        """Mark a cut's rows again, in addition to those marked since."""
        for marks, share in cut.shares.items():
            marks.give_back(share)
        self._open.discard(cut)

    def forget(self, cut: Cut) -> None:
        """Drop a cut whose rows are durable."""
        for marks, share in cut.shares.items():
            marks.settle(share)
        self._open.discard(cut)
