"""Run work in an order where it matters, on threads elsewhere.

A restore needs this: a row that two checkpoints hold must be the newer one's, so threads read and
decode chunks at their own pace, but claim the rows of a table checkpoint by checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain

import torch

Turn = AbstractContextManager[None]
"""Entered once all earlier steps of the lane have had their turns, beside others of its step."""


Work = Callable[[int, Callable[[int], Turn]], None]
"""Does the parts of the item of that number in their order; may enter the turn of each part, by its
number in the item, once or not at all."""


Stage = tuple[Hashable, Hashable]
"""A lane and a step in it: a lane's turns come step by step, within a step in any order."""


def run_in_order(
    work: Work,
    sizes: Sequence[int],
    stages: Sequence[Sequence[Stage]],
    most: int,
    threads: int,
) -> None:
    """Do items 0 to ``len(sizes) - 1``, each on the next free thread.

    Args:
        work: called once per item.
        sizes: bytes of each item.
        stages: stage of each part of each item; a lane's steps are in the order of their first
            appearance.
        most: bytes of all items in progress together; a single item may exceed it.
        threads: number of threads, the calling one included.

    Raises:
        Exception: the error of the lowest-numbered item that failed, once no thread is at work any
            more. All items before it were done, and some of those after it.
    """
    line = _Line(sizes, stages, most)
    helpers = min(threads, len(sizes)) - 1
    if helpers < 1:
        _work(line, work)
    else:
        _with_helpers(line, work, helpers)
    if line.error is not None:
        raise line.error


def _with_helpers(line: _Line, work: Work, helpers: int) -> None:
    """Work on this thread and on helpers, in this thread's CUDA stream and inference mode."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    inference = torch.is_inference_mode_enabled()

    def help_out() -> None:
        torch.set_num_threads(1)  # for this thread's own operations
        with torch.inference_mode(inference), torch.cuda.stream(stream):
            _work(line, work)

    threads = [
        threading.Thread(target=help_out, name=f"checknrun-restore-{number}", daemon=True)
        for number in range(helpers)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for thread in threads:
            thread.start()
        _work(line, work)
        for thread in threads:
            thread.join()
    finally:
        line.stop()  # where this thread was interrupted
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        torch.set_num_threads(before)


class _Stopped(Exception):
    """An earlier item failed, so that this item's turn never comes."""


class _Line:
    """The items that are waiting, in progress and done, shared by all threads.

    Args: see ``run_in_order``.

    Attributes:
        error: of the lowest-numbered item that failed.
    """

    def __init__(self, sizes: Sequence[int], stages: Sequence[Sequence[Stage]], most: int) -> None:
        self._sizes, self._stages = sizes, stages
        self._free = most
        self._changed = threading.Condition()
        self._begun = 0
        self._busy = 0
        self._passed: set[tuple[int, int]] = set()
        # By lane and step, the number of parts that have not passed; finished steps are removed.
        self._left: dict[Hashable, dict[Hashable, int]] = {}
        for lane, step in chain.from_iterable(stages):
            steps = self._left.setdefault(lane, {})
            steps[step] = steps.get(step, 0) + 1
        self._failed = len(sizes)
        self.error: BaseException | None = None

    def begin(self) -> int | None:
        """Wait until there is room for the next item; return its number, None if there is none."""
        with self._changed:
            while self._begun < min(self._failed, len(self._sizes)):
                size = self._sizes[self._begun]
                if size <= self._free or not self._busy:
                    self._free -= size
                    self._busy += 1
                    self._begun += 1
                    return self._begun - 1
                self._changed.wait()
            return None

    @contextmanager
    def turn(self, number: int, part: int) -> Iterator[None]:
        """Wait for the turn of an item's part, which passes when the block ends."""
        lane, step = self._stages[number][part]
        with self._changed:
            self._changed.wait_for(
                lambda: next(iter(self._left[lane])) == step or self._failed < number
            )
            if self._failed < number:
                raise _Stopped
        yield
        self._pass(number, part)

    def end(self, number: int, error: BaseException | None = None) -> None:
        """Record that an item is done, or has failed."""
        with self._changed:
            self._free += self._sizes[number]
            self._busy -= 1
            if error is None:
                for part in range(len(self._stages[number])):
                    self._pass(number, part)
            elif number < self._failed:
                self._failed, self.error = number, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more items and grant no more turns."""
        with self._changed:
            self._failed = -1
            self._changed.notify_all()

    def _pass(self, number: int, part: int) -> None:
        """Let the parts of the next step have their turns once this was the last of its step."""
        with self._changed:
            if (number, part) in self._passed:
                return
            self._passed.add((number, part))
            lane, step = self._stages[number][part]
            steps = self._left[lane]
            steps[step] -= 1
            while steps and not steps[first := next(iter(steps))]:
                del steps[first]
                self._changed.notify_all()


def _work(line: _Line, work: Work) -> None:
    """Do items until there are no more."""
    while (number := line.begin()) is not None:
        try:
            work(number, partial(line.turn, number))
        except _Stopped:
            line.end(number)
        except BaseException as error:
            line.end(number, error)
        else:
            line.end(number)
