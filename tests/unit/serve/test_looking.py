"""A thread that looks at a root leaves the program's own numbers alone."""

from __future__ import annotations

import random
import threading

from torchrec_checknrun.serve.looking import start_looking
from torchrec_checknrun.threads import end_all


class Failing:
    """A follower whose looks fail; the third is the last."""

    def __init__(self) -> None:
        self.looks, self.closing = 0, threading.Event()

    def look(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.closing.set()
        return True


def test_pauses_after_errors_draw_from_no_generator_of_the_program() -> None:
    follower, before = Failing(), random.getstate()
    start_looking(follower, follower.closing, interval_seconds=1e-4).join(60)
    assert follower.looks == 3
    assert random.getstate() == before


class Idle:
    """A follower that finds nothing new."""

    def look(self) -> bool:
        return False


def test_a_program_that_ends_waits_for_the_thread() -> None:
    """A thread in PyTorch's code, which an interpreter that has ended doesn't take back, aborts."""
    follower = Idle()
    thread = start_looking(follower, threading.Event(), interval_seconds=600)
    end_all()
    assert not thread.is_alive()
