"""Small agreements between ranks: rank 0 decides for all, or all ranks share their values.

An error on one rank becomes an error on all, so that none is left waiting in the next collective.
"""

from __future__ import annotations

import pickle
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchrec_checknrun.errors import CheckNRunError

T = TypeVar("T")
R = TypeVar("R")

_MOST_NAMED = 8
_ALONE = (
    "Perhaps another rank has ended, which its log tells, came later than timeout_seconds allows, "
    "or didn't make this call: step(), save(), wait(), restore() and close() are made on every "
    "rank, in the same order."
)
"""A note to gloo's errors, which name no cause."""
_NOT_MADE = (
    "Perhaps another rank has ended, which its log tells, or didn't make this call: a Checkpointer "
    "is made, and load_tables() called, on every rank that init_process_group() has joined. Ranks "
    "that don't train this model need a job of their own."
)
"""A note to the store's error where the group is not made on all ranks."""
_PARTED = (
    "the ranks have lost each other: one has ended, or was waited for longer than timeout_seconds "
    "allows, which the logs of the others tell"
)


_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By default group, the gloo group that ``gloo_beside`` has made."""


@dataclass(frozen=True)
class _Failure:
    """The error of one rank, and its traceback as text once it is sent."""

    error: Exception
    trace: str = ""


class Ranks:
    """The ranks of a job, and a gloo group of their own for control messages.

    Made on all ranks at once. Without torch.distributed one rank is there, and agrees with itself.

    Args:
        timeout: how long a collective may wait for a rank that doesn't come.

    Attributes:
        parted: whether a collective has failed here: gloo has closed connections then, and all
            later ones fail as well.
    """

    parted = False
    _reduced: dist.Work | None = None

    def __init__(self, timeout: timedelta) -> None:
        self.group: dist.ProcessGroup | None = None
        self._timeout = timeout
        if dist.is_available() and dist.is_initialized():
            self.group = self._new_group(_NOT_MADE)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Use a group that exists already; None: this rank alone."""
        ranks = cls.__new__(cls)
        ranks.group = group
        return ranks

    def meet_again(self) -> None:
        """Make the group anew where any rank was ``parted``; a collective, while nobody uses it."""
        if self.group is not None:
            before, self.group = self.group, self._new_group(_ALONE)
            self.parted = False
            dist.destroy_process_group(before)

    def _new_group(self, note: str) -> dist.ProcessGroup:
        try:
            return dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            _add_note(error, note)
            raise

    def close(self) -> None:
        """Release the group's threads and connections without waiting for other ranks; nobody may
        be using the group.
        """
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None
            vars(self).update(rank=0, world_size=1)

    @cached_property
    def rank(self) -> int:
        """Return this rank's number in the group."""
        return dist.get_rank(self.group) if self.group else 0

    @cached_property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return dist.get_world_size(self.group) if self.group else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            self.parted = True
            _add_note(error, _ALONE)
            raise
        return values

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values, on all ranks."""
        if self.world_size == 1:
            return value
        found = torch.tensor(value, dtype=torch.int64, device="cpu")
        try:
            work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            # Kept: gloo's thread, were it the last to drop it, would need the interpreter, which
            # may end meanwhile, to drop the tensor.
            self._reduced = work
            work.wait()
        except RuntimeError:
            self.parted = True
            raise
        return int(found)

    def on_all_ranks(self, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on all ranks and return all results on all of them.

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
        """Run ``decide`` on rank 0 only; return its result, or raise its error, on all ranks."""
        decided = self.on_all_ranks(lambda: [decide()] if self.rank == 0 else [])
        return decided[0][0]

    def reduce(self, act: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
        """Run ``act`` on all ranks, gather the results on rank 0, and broadcast rank 0's decision.

        Only rank 0 ever holds all results, so that this scales to many ranks.

        Args:
            decide: called on rank 0 with all results, in rank order.

        Raises:
            Exception: an error of any rank, the same on every rank: the lowest rank's, but errors
                of this package or of the storage first. A ``RuntimeError`` or an ``OSError`` in its
                place where it can't be sent, or is no ``Exception``. A note of the error names the
                rank and has the traceback there (Python 3.11 and later).
            TypeError: a rank's result, or the decision, can't be pickled; on every rank.
        """
        own = _attempt(act)
        decision = self._decide(own, decide)
        if self.world_size == 1:
            return _unpacked(own, decision)

        def broadcast(value: R | _Failure | None) -> R | _Failure | None:
            sent = [value]
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
            return sent[0]

        return _unpacked(own, self._send(broadcast, decision))

    def reduce_scatter(self, act: Callable[[], T], decide: Callable[[list[T]], list[R]]) -> R:
        """Run ``act`` on all ranks, gather the results on rank 0, and scatter rank 0's answers.

        Args:
            decide: called on rank 0 with all results, in rank order; returns an answer for each.

        Raises:
            Exception: see ``reduce``.
        """
        own = _attempt(act)
        decision = self._decide(own, decide)
        if self.world_size == 1:
            assert decision is not None
            return _unpacked(own, decision if isinstance(decision, _Failure) else decision[0])

        def scatter(value: list[R] | _Failure | None) -> R | _Failure:
            answers = [value] * self.world_size if isinstance(value, _Failure) else value
            answer: list[R | _Failure] = [_Failure(RuntimeError("rank 0 gave no answer"))]
            dist.scatter_object_list(answer, answers, group=self.group, group_src=0)
            return answer[0]

        return _unpacked(own, self._send(scatter, decision))

    def _decide(self, own: T | _Failure, decide: Callable[[list[T]], R]) -> R | _Failure | None:
        """Gather the ranks' results and return rank 0's decision; None on other ranks."""
        if self.world_size == 1:
            return own if isinstance(own, _Failure) else _attempt(lambda: decide([own]))
        gathered: list[T | _Failure] | None = [own] * self.world_size if self.rank == 0 else None

        def gather(value: T | _Failure) -> None:
            dist.gather_object(value, gathered, group=self.group, group_dst=0)

        self._send(gather, _sendable(own))
        if gathered is None:
            return None
        failures = {r: result for r, result in enumerate(gathered) if isinstance(result, _Failure)}
        if failures:
            return _foremost(failures)
        results = [result for result in gathered if not isinstance(result, _Failure)]
        decision = _sendable(_attempt(lambda: decide(results)))
        return _foremost({0: decision}) if isinstance(decision, _Failure) else decision

    def _send(self, collective: Callable[[T | _Failure], R], value: T | _Failure) -> R:
        """Send a value by a collective, or the error of a value that can't be pickled.

        Collectives pickle before they communicate, so that no other rank notices the first try.

        Raises:
            RuntimeError: the other ranks can't be reached.
        """
        try:
            return collective(value)
        except Exception as failed:
            try:
                pickle.dumps(value)
            except Exception as unsendable:
                error = TypeError(
                    f"a {type(value).__name__} can't be sent to other ranks: {unsendable!r}"
                )
            else:
                self.parted = True
                raise RuntimeError(f"{_PARTED} ({failed})") from failed
        return collective(_sendable(_Failure(error)))

    def store(self) -> dist.Store | None:
        """Open a connection of its own to the ranks' key-value store; None for one rank alone.

        Called on all ranks at once. Its keys are seen by nobody else: not by another call's, nor by
        the workers that torchrun starts after these, which find the same store.
        """
        if self.group is None or self.world_size == 1:
            return None
        name = self.from_rank_0(lambda: secrets.token_hex(8))
        store = self.group.get_group_store()
        return dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]  # not in torch's stub


def gloo_beside() -> dist.ProcessGroup | None:
    """Return a group of all ranks that sends tensors of the CPU: None, the default group, where
    that can; else a gloo group, made once. Called on all ranks at once.
    """
    default = dist.group.WORLD
    if default is None or "cpu" in dist.get_backend_config():
        return None
    made = _beside.get(default)
    if made is None:
        made = _beside[default] = dist.new_group(backend="gloo")
    return made


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks for an error, the first eight of them."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed([str(rank) for rank in ranks])}"


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Join names for an error, the first eight of them."""
    return separator.join([*names[:_MOST_NAMED], *["…"] * (len(names) > _MOST_NAMED)])


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def _attempt(act: Callable[[], T]) -> T | _Failure:
    try:
        return act()
    except Exception as error:
        return _Failure(error)
    except BaseException as error:
        return _Failure(RuntimeError(repr(error)).with_traceback(error.__traceback__))


def _sendable(result: T | _Failure) -> T | _Failure:
    if not isinstance(result, _Failure):
        return result
    trace = "".join(traceback.format_exception(result.error)).rstrip()
    return _Failure(picklable(result.error), trace)


def _unpacked(own: object, answer: T | _Failure | None) -> T:
    """Return rank 0's answer, or raise its error, with this rank's own error as the cause."""
    if isinstance(answer, _Failure):
        cause = own.error if isinstance(own, _Failure) else None
        if cause is None or cause is answer.error:
            raise answer.error
        raise answer.error from cause
    return cast(T, answer)


def _foremost(failures: Mapping[int, _Failure]) -> _Failure:
    """Choose the error to raise: the first of this package or of the storage, else the first.

    A note names the rank and has its traceback, which the error itself loses when it is sent.

    Args:
        failures: by rank, in rank order.
    """
    own = (r for r, each in failures.items() if isinstance(each.error, (CheckNRunError, OSError)))
    rank = next(own, next(iter(failures)))
    failure = failures[rank]
    lines = [f"failed on rank {rank}:", failure.trace]
    others = [f"rank {r}: {each.error!r}" for r, each in failures.items() if r != rank]
    if others:
        lines += [f"and on {len(others)} others:", *others[:_MOST_NAMED]]
    if hasattr(failure.error, "add_note") and not hasattr(failure.error, "__notes__"):  # 3.11
        failure.error.add_note("\n".join(lines))
    return failure


def picklable(error: Exception) -> Exception:
    """Return the error itself, or one that says the same: an ``OSError`` stays one."""
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
    """Raise errors of the block in a form in which they reach other ranks."""
    try:
        yield
    except Exception as error:
        raised = picklable(error)
        if raised is error:
            raise
        raise raised from error
