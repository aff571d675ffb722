"""Check that the ranks' parts of a table make up the whole: nothing twice, nothing left out."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.shards import Rectangle, TableShape


def check_coverage(name: str, whole: TableShape, held: Iterable[tuple[Rectangle, int]]) -> None:
    """Refuses parts that overlap or leave something of the whole out.

    Args:
        name: what errors call the whole.
        held: the parts, each with its rank.

    Raises:
        InvalidPlan: names the ranks and parts.
    """
    parts = sorted(part for part in held if part[0].area)
    for i, (one, rank) in enumerate(parts):
        for j in range(i + 1, len(parts)):
            other, other_rank = parts[j]
            if other.row_start >= one.row_stop:
                break
            if one.intersect(other):
                raise InvalidPlan(
                    f"{name}: ranks {rank} and {other_rank} would both write {one} ∩ {other}"
                )
    covered = sum(part.area for part, _ in parts)
    if covered != whole.rows * whole.dim:
        raise InvalidPlan(
            f"{name}: the ranks hold {covered} of {whole.rows} × {whole.dim} values, as "
            f"{[str(part) for part, _ in parts]}; every rank must take part in the save, with the "
            "process group the model is sharded over"
        )
