"""Whether parts make up one whole: nothing twice, nothing left out. When written, and when read."""

from __future__ import annotations

from bisect import bisect_left
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


def tiles(whole: Rectangle, parts: Iterable[Rectangle]) -> bool:
    """Whether parts, none of which reaches beyond the whole, make it up."""
    parts = [part for part in parts if part.area]
    if sum(part.area for part in parts) != whole.area:
        return False  # from here on it takes no more time than there are values
    cuts = sorted({cut for part in parts for cut in (part.col_start, part.col_stop)})
    ends = dict.fromkeys(cuts, whole.row_start)
    for part in sorted(parts):
        within = slice(bisect_left(cuts, part.col_start), bisect_left(cuts, part.col_stop))
        for column in cuts[within]:
            if ends[column] != part.row_start:
                return False
            ends[column] = part.row_stop
    return True
