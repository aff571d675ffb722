"""Encode the rows of one save upon references, and undo that unless the save is committed.

The background encodes; the training thread ends the transaction once the outcome is known. What a
link has changed is recorded, and put back by ``undo``. A base replaces everything and records
nothing: after one that failed the next checkpoint is a base again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TypeVar

import torch

from torchrec_checknrun.delta.digest import WORD
from torchrec_checknrun.delta.references import References, Undo, Upon
from torchrec_checknrun.errors import SaveFailed

_T = TypeVar("_T")

TableDigests = dict[str, tuple[int | None, int]]
"""By table, the sum of digests before a save, None for a base, and after; of one rank's rows."""


class Transaction:
    """The changes of one save to the references of this rank's shards.

    Args:
        references: those that the save builds on, or fills if it is a base.
        base: whether all rows stand alone.
    """

    def __init__(self, references: Iterable[References], base: bool) -> None:
        self.base = base
        self._references = list(references)
        self._lock = threading.Lock()
        self._open = True
        self._cleared = not base
        self._undo: list[Undo] = []
        self._before = [one.digest for one in self._references]
        self._digests_before = [one.digests_as_now() for one in self._references]

    def encode(self, references: References, ids: torch.Tensor, upon: Upon[_T]) -> _T:
        """Encode rows, or their state, upon their predecessors, which they replace.

        Args:
            ids: ``(n,)`` int64, global, sorted and distinct.
            upon: encodes them.

        Raises:
            SaveFailed: the save was given up.
        """
        positions = ids.cpu().numpy() - references.rectangle.row_start

        def note(undo: Undo) -> None:
            if not self.base:
                self._undo.append(undo)

        with self._lock:
            if not self._open:
                raise SaveFailed("the save whose rows were to be encoded was given up")
            self._clear()
            return upon(references, positions, note)

    def digests(self) -> TableDigests:
        """Return the tables' digests before and after the save, once all rows are encoded."""
        found: TableDigests = {}
        with self._lock:
            self._clear()
            for one, before in zip(self._references, self._before, strict=True):
                known = found.get(one.table, (0, 0))
                earlier = None if self.base else ((known[0] or 0) + before) % WORD
                found[one.table] = earlier, (known[1] + one.digest) % WORD
        return found

    def keep(self) -> None:
        """Keep the changes: the save is committed."""
        with self._lock:
            self._open, self._undo = False, []

    def undo(self) -> None:
        """Undo the changes of a link, whose save was not committed; idempotent. Encoding for this
        save fails from now on.
        """
        with self._lock:
            self._open = False
            for put_back in reversed(self._undo):
                put_back()
            if not self.base:
                for put_back in self._digests_before:
                    put_back()
            self._undo = []

    def _clear(self) -> None:
        """Clear what a base replaces: behind training, not in the constructor."""
        if not self._cleared:
            self._cleared = True
            for one in self._references:
                one.clear()
