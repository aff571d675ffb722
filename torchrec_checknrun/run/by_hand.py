"""Let a program name the rows that it writes by hand, beside training."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torchrec_checknrun.model.tracked_shard import RowIds
from torchrec_checknrun.recovery.survival import Survival
from torchrec_checknrun.restore.restore import Target


class WrittenByHand:
    """The part of a Checkpointer that marks rows for a program."""

    _target: Target
    _survival: Survival

    def mark(self, table: str, rows: RowIds) -> None:
        """Mark rows (global ids) that were written unnoticed by PyTorch; call it on all ranks.

        Writes through ``.data``, NumPy, a collective on the table or a kernel of your own need
        this. Other writes by hand (``copy_``, ``weight[rows] = …``, ``load_state_dict``, also of
        optimizers) are noticed, and mark all rows of the tables concerned, whether ``mark`` names
        some or not: wrap them in ``writing`` to save only the rows written.

        Raises:
            KeyError, IndexError: no such table, or no such row of it.
        """
        self._target.tracked.mark(table, rows)
        self._survival.missed("they were written unnoticed, and marked afterwards")

    def writing(self, table: str, rows: RowIds) -> AbstractContextManager[None]:
        """Mark these rows (global ids), and no others, for the writes of a ``with`` block.

        Enter it on all ranks; each rank writes the rows that it holds. Raises as ``mark``.
        """
        return self._target.tracked.writing(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Mark all rows of a table, or of all tables; call it on all ranks."""
        self._target.tracked.mark_all(table)
        self._survival.missed("they were written unnoticed, and marked afterwards")
