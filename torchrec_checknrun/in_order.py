"""Several threads for things that must be begun, and pass one point, in a given order.

A restore reads chunks with several threads, and a row that two checkpoints hold must be the newer
one's. So threads read and decode at their own pace, but claim rows in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

Turn = AbstractContextManager[None]
"""Entered in the things' order: by one thread at a time."""
Work = Callable[[int, Turn], None]
"""Does the thing of that number; it may enter its turn once, or not at all."""


def work_in_order(work: Work, sizes: Sequence[int], most: int, threads: int) -> None:
    """Does things 0 to ``len(sizes) - 1``, each by whichever of some threads is free.

    Args:
        work: called for each.
        sizes: of the things, in bytes.
        most: how large those that are being done may be together; one is always done.
        threads: how many; this one is the first.

    Raises:
        Exception: the first failed thing's, in their order, when no thread is at work any more.
            All before it were done; of those after it, some.
    """
    line = _Line(sizes, most)
    helpers = min(threads, len(sizes)) - 1
    if helpers < 1:
        _work(line, work)
    else:
        _with_helpers(line, work, helpers)
    if line.error is not None:
        raise line.error


def _with_helpers(line: _Line, work: Work, helpers: int) -> None:
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    inference = torch.is_inference_mode_enabled()

    def help_out() -> None:
        torch.set_num_threads(1)  # of this thread's operations
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
    """What came before has failed."""


class _Line:
    def __init__(self, sizes: Sequence[int], most: int) -> None:
        self._sizes = sizes
        self._free = most
        self._changed = threading.Condition()
        self._begun = 0
        self._busy = 0
        self._turn = 0
        self._passed: set[int] = set()
        self._failed = len(sizes)
        self.error: BaseException | None = None

    def begin(self) -> int | None:
        """The next thing, when there is room for it; None: no more."""
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
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number or self._failed < number)
            if self._failed < number:
                raise _Stopped
        yield
        self._pass(number)

    def end(self, number: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._free += self._sizes[number]
            self._busy -= 1
            if error is None:
                self._pass(number)
            elif number < self._failed:
                self._failed, self.error = number, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is begun, and nobody's turn comes."""
        with self._changed:
            self._failed = -1
            self._changed.notify_all()

    def _pass(self, number: int) -> None:
        with self._changed:
            if number < self._turn:
                return
            self._passed.add(number)
            while self._turn in self._passed:
                self._passed.remove(self._turn)
                self._turn += 1
            self._changed.notify_all()


def _work(line: _Line, work: Work) -> None:
    while (number := line.begin()) is not None:
        try:
            work(number, line.turn(number))
        except _Stopped:
            line.end(number)
        except BaseException as error:
            line.end(number, error)
        else:
            line.end(number)
