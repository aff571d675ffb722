"""Mark the rows of a lookup in the tables of a kernel, by one compiled operation where possible.

Table by table a step of a thousand tables takes 5 ms, most of it Python's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.native import has_extension

_TYPES = (torch.int64, torch.int32)


def mark_lookup(
    marks: Sequence[Marks],
    ids: torch.Tensor,
    offsets: Sequence[int],
    places: Sequence[int],
    keep: bool,
) -> None:
    """Mark rows for every consumer.

    Args:
        marks: of a kernel's tables.
        ids: shard-local ids of all features, ``(n,)`` of any integer dtype, see ``Marks.mark``.
        offsets: place of each feature's first id, and the end.
        places: of each feature the place of its table's marks.
        keep: see ``Marks.mark``.
    """
    if (
        ids.dtype in _TYPES
        and ids.device.type == "cpu"
        and not any(each.noted is not None or (keep and each.kept is not None) for each in marks)
        and has_extension()
    ):
        live = [each.padded for each in marks]
        every = int(Consumer.EVERY)
        torch.ops.checknrun.mark_lookup(ids.contiguous(), offsets, places, live, every)
        return
    for feature, place in enumerate(places):
        marks[place].mark(ids[offsets[feature] : offsets[feature + 1]], keep)
