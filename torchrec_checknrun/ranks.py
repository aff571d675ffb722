"""Let ranks agree: rank 0 decides and all ranks hear, or every rank tells and all ranks know.

An error on one rank becomes an error on all ranks, so that none is left waiting in the next
collective. On the way there an exception is pickled. One that can't be pickled (of a class made
within a function, or with a connection in it) would fail in the middle of a collective and leave
the other ranks waiting, so ``picklable`` replaces it.
"""

from __future__ import annotations

import pickle
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_checknrun.errors import CheckNRunError

T = TypeVar("T")

_MOST_NAMED = 8
"""Ranks or names that an error lists."""


class Ranks:
    """The ranks of a job, with a gloo group of their own for control messages.

    The constructor is a collective call. Without torch.distributed there is one rank, which agrees
    with itself.

    Args:
        timeout: the longest that a collective waits for a rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Use the ranks of an existing group; None: this rank alone."""
        ranks = cls.__new__(cls)
        ranks.group = group
        return ranks

    def close(self) -> None:
        """Release the group's threads and connections, without waiting for other ranks.

        No other thread may be using the group.
        """
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group) if self.group else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_all_ranks(self, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on all ranks; return every rank's results, in rank order, on all ranks.

        Raises:
            Exception: the error of the first rank that failed, on every rank; a ``RuntimeError`` or
                an ``OSError`` of the same text where the error can't be pickled.
        """
        outcome: list[T] | Exception
        try:
            outcome = [act()]
        except Exception as error:
            outcome = error if self.world_size == 1 else picklable(error)
        results: list[T] = []
        for of_rank in self.gather(outcome):
            if isinstance(of_rank, Exception):
                raise of_rank
            results += of_rank
        return results

    def from_rank_0(self, decide: Callable[[], T]) -> T:
        """Run ``decide`` on rank 0 only; return its result, or raise its error, on all ranks."""
        decided = self.on_all_ranks(lambda: [decide()] if self.rank == 0 else [])
        return decided[0][0]

    def store(self) -> dist.Store | None:
        """Open a new connection to the ranks' key-value store; None for one rank alone.

        A collective call. Keys are private to this call: neither another call nor the workers that
        torchrun starts later, which find the same store, see them.
        """
        if self.group is None or self.world_size == 1:
            return None
        name = self.from_rank_0(lambda: secrets.token_hex(8))
        store = self.group.get_group_store()
        return dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]  # not in torch's stub


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks for an error, the first eight of them."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed([str(rank) for rank in ranks])}"


def listed(names: Sequence[str]) -> str:
    """Join names for an error, the first eight of them."""
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


def own_error(error: CheckpointException) -> Exception:
    """Return the error that made DCP fail: the first rank's, preferably one of this package."""
    failures = [failure for _, (failure, _) in sorted(error.failures.items())]
    for failure in failures:
        if isinstance(failure, (CheckNRunError, OSError)):
            return failure
    first = failures[0]
    return first if isinstance(first, Exception) else RuntimeError(repr(first))


def picklable(error: Exception) -> Exception:
    """Return the error, or one of the same text that can be pickled: an ``OSError`` stays one."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass  # classes may fail here in any way
    text = traceback.format_exception_only(error)[-1].strip()
    kind = OSError if isinstance(error, OSError) else RuntimeError
    return kind(text).with_traceback(error.__traceback__)


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Replace an error that leaves the block by one that can be pickled."""
    try:
        yield
    except Exception as error:
        raised = picklable(error)
        if raised is error:
            raise
        raise raised from error
