"""Small agreements between ranks: rank 0 decides and all hear, or all tell and all know.

An error on one rank becomes an error on all, so that none is left waiting in the next collective.
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


class Ranks:
    """The ranks of a job, and a gloo group of their own for control messages.

    Made on all ranks at once. Without torch.distributed one rank is there, and agrees with itself.

    Args:
        timeout: how long a collective may wait for a rank that doesn't come.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a group that exists already; None: this rank alone."""
        ranks = cls.__new__(cls)
        ranks.group = group
        return ranks

    def close(self) -> None:
        """Gives the group's threads and connections back; nobody may be using it. Waits for no
        other rank.
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
        """Every rank's value, in rank order, on all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_all_ranks(self, act: Callable[[], T]) -> list[T]:
        """Runs ``act`` on all ranks and gives all results to all.

        Raises:
            Exception: the first rank's that failed, on every rank; a ``RuntimeError`` or an
                ``OSError`` in its place where it can't be sent.
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
        """Runs ``decide`` on rank 0 only and gives its result, or its error, to all ranks."""
        decided = self.on_all_ranks(lambda: [decide()] if self.rank == 0 else [])
        return decided[0][0]

    def store(self) -> dist.Store | None:
        """A connection of its own to the ranks' key-value store; None for one rank alone.

        Called on all ranks at once. Its keys are seen by nobody else: not by another call's, nor by
        the workers that torchrun starts after these, which find the same store.
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
    """The error that made DCP fail: the first rank's, preferably one of this package."""
    failures = [failure for _, (failure, _) in sorted(error.failures.items())]
    for failure in failures:
        if isinstance(failure, (CheckNRunError, OSError)):
            return failure
    first = failures[0]
    return first if isinstance(first, Exception) else RuntimeError(repr(first))


def picklable(error: Exception) -> Exception:
    """The error itself, or one that says the same: an ``OSError`` stays one."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass  # whatever the class does
    text = traceback.format_exception_only(error)[-1].strip()
    kind = OSError if isinstance(error, OSError) else RuntimeError
    return kind(text).with_traceback(error.__traceback__)


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Errors leave the block in a form in which they reach other ranks."""
    try:
        yield
    except Exception as error:
        raised = picklable(error)
        if raised is error:
            raise
        raise raised from error
