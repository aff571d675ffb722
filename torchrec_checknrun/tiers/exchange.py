"""Move bytes from ranks to ranks, piece by piece, all at once.

Every rank goes through the pieces in the same order and waits for its own alone: piece n is sent
when piece n - 1 of all its moves is there, so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_checknrun.ranks import Ranks

PIECE = 8 << 20


class Move(NamedTuple):
    """Bytes that one rank sends to another.

    Attributes:
        source, target: ranks; of two moves at once, not both the same.
        size: in bytes.
    """

    source: int
    target: int
    size: int


def exchange(
    ranks: Ranks,
    moves: Sequence[Move],
    read: Callable[[Move, int, int], bytes],
    write: Callable[[Move, memoryview], object],
) -> None:
    """Move bytes; a collective, with the same moves on all ranks.

    Args:
        read: returns bytes to send, given offset and size; must not fail.
        write: takes bytes that have come; must not fail.
    """
    own = [move for move in moves if ranks.rank in (move.source, move.target)]
    for at in range(0, max((move.size for move in own), default=0), PIECE):
        works: list[tuple[dist.Work | None, torch.Tensor]] = []  # with what is sent
        came: list[tuple[Move, torch.Tensor]] = []
        for move in own:
            size = min(PIECE, move.size - at)
            if size <= 0:
                continue
            if move.source == ranks.rank:
                piece = torch.frombuffer(bytearray(read(move, at, size)), dtype=torch.uint8)
                work = dist.isend(piece, group=ranks.group, group_dst=move.target)
            else:
                piece = torch.empty(size, dtype=torch.uint8)
                work = dist.irecv(piece, group=ranks.group, group_src=move.source)
                came.append((move, piece))
            works.append((work, piece))
        for work, _ in works:
            if work is not None:
                work.wait()
        for move, piece in came:
            write(move, piece.numpy().data)
