"""Let a program name the rows that it writes by hand, beside training."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from torchrec_checknrun.marks.row_copies import KernelCopies
from torchrec_checknrun.model.tracked_shard import RowIds
from torchrec_checknrun.recovery.survival import Survival
from torchrec_checknrun.restore.restore import Target

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


class WrittenByHand:
    """The part of a Checkpointer that marks rows for a program."""

    _target: Target
    _survival: Survival
    _told_of_late_marks = False

    def mark(self, table: str, rows: RowIds) -> None:
        """Mark rows (global ids) that are written unnoticed by PyTorch; call it on all ranks, and
        before the write: after it, a checkpoint whose rows are still being copied may hold the new
        ones, of which a warning tells.

        Writes through ``.data``, NumPy, a collective on the table or a kernel of your own need
        this. Other writes by hand (``copy_``, ``weight[rows] = …``, ``load_state_dict``, also of
        optimizers) are noticed, and mark all rows of the tables concerned, whether ``mark`` names
        some or not: wrap them in ``writing`` to save only the rows written.

        Raises:
            KeyError, IndexError: no such table, or no such row of it.
        """
        before = sum(copies.protected_rows() for copies in self._being_copied(table))
        self._target.tracked.mark(table, rows)
        if sum(copies.protected_rows() for copies in self._being_copied(table)) > before:
            self._warn_of_late_marks(f"rows of {table}", "call mark() before the write")
        self._survival.missed("they were written unnoticed, and marked afterwards")

    def writing(self, table: str, rows: RowIds) -> AbstractContextManager[None]:
        """Mark these rows (global ids), and no others, for the writes of a ``with`` block.

        Enter it on all ranks; each rank writes the rows that it holds. Raises as ``mark``.
        """
        return self._target.tracked.writing(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Mark all rows of a table, or of all tables; call it on all ranks. See ``mark``."""
        if self._being_copied(table):
            tables = "all rows of all tables" if table is None else f"all rows of {table}"
            self._warn_of_late_marks(tables, "call wait() before the write")
        self._target.tracked.mark_all(table)
        self._survival.missed("they were written unnoticed, and marked afterwards")

    def _being_copied(self, table: str | None) -> list[KernelCopies]:
        """Return the copies that are being made of a table's rows, or of all tables'."""
        shards = self._target.tracked.shards
        kept = [shard.writes.copies for shard in shards if table in (None, shard.table)]
        return [each for each in dict.fromkeys(kept) if each is not None and not each.copies.over]

    def _warn_of_late_marks(self, what: str, remedy: str) -> None:
        if self._told_of_late_marks:
            return
        self._told_of_late_marks = True
        logger.warning(
            "%s were marked while a checkpoint was still copying them: if they were written before "
            "that, since the checkpoint was begun, it holds some of them as they are now. Write "
            'them inside `with checkpointer.writing(table, rows):`, %s, or give staging="copy"',
            what,
            remedy,
        )
