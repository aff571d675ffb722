"""Wait for a checkpoint in the background as long as it makes progress, then give it up.

Storage calls and collectives end by themselves (``deadlines``, gloo's timeout), and so does their
save. A save that hangs for any other reason is given up here: training, ``close`` and the
interpreter's exit go on without it, and it is never committed.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.store.deadlines import EXIT_SECONDS, longest_silence

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_LOOK_SECONDS = 0.2
_MARGIN = 0.1
"""Share of the timeout, beside a second: the part that notices a fault first should report it."""


def await_save(save: Save, seconds: float | None = None) -> None:
    """Wait until a save's outcome is known; give the save up once it makes no progress.

    Args:
        seconds: without progress; None: as long as its storage operations may take.
    """
    limit = (save.patience.timeout_seconds if seconds is None else seconds) * (1 + _MARGIN) + 1
    started = time.monotonic()
    known = save.known
    while not known.wait(_LOOK_SECONDS):
        silent = time.monotonic() - max(started, save.patience.heard)
        if silent > limit:
            save.give_up(_given_up(save, silent), force=silent > 2 * limit)


def await_at_exit(save: Save) -> None:
    """Wait like ``await_save``, but only seconds for a storage call that stays unanswered.

    A process that is to end gives its save up after ``EXIT_SECONDS`` of the storage's silence.
    """
    limit = min(EXIT_SECONDS, save.patience.timeout_seconds)
    started = time.monotonic()
    known = save.known
    while not known.wait(_LOOK_SECONDS):
        silence, _ = longest_silence()
        seconds = min(silence, time.monotonic() - started)
        if seconds > limit:
            save.give_up(_given_up(save, silence), force=True)
        elif time.monotonic() - max(started, save.patience.heard) > save.patience.timeout_seconds:
            save.give_up(_given_up(save, save.patience.timeout_seconds), force=True)


def finish_at_exit(save: Save) -> None:
    """Finish a save at the exit of a script that did not call ``close``, or log its failure."""
    if os.getpid() != save.process:
        return  # a fork, which has none of the threads: the save is its parent's
    if getattr(sys, "last_value", None) is not None:
        return  # the script ended by an error: the other ranks may never arrive
    await_at_exit(save)
    save.leave()
    try:
        save.result()
    except Exception:
        logger.exception("the last checkpoint was not committed")


def warn_of_end(save: Save | None) -> None:
    """Warn that the end of the data has ended a Checkpointer as an error does.

    Args:
        save: the last one that was begun, if its outcome was not noted.
    """
    given_up = ""
    if save is not None and not save.done:
        given_up = f", and the checkpoint of step {save.proposal.header.step} is given up"
    logger.warning(
        "StopIteration, with which TorchRec's pipelines end, has left the Checkpointer's with "
        "block, as an error does: nothing more is saved%s. Catch it inside the block",
        given_up,
    )


def still_hanging(step: int, ranks: list[int]) -> SaveFailed:
    """Return the error of a save that can't begin while an earlier one hangs on ``ranks``."""
    return SaveFailed(
        f"step {step}: an earlier checkpoint was given up, and what it waits for on ranks {ranks} "
        "has not come back yet. Nothing can be saved until then; if it never does, restart the "
        "job: it goes on from its last checkpoint"
    )


def _given_up(save: Save, seconds: float) -> SaveFailed:
    silence, what = longest_silence()
    waits = f"{what}: no answer for {silence:.3g} s" if what else "waiting for the other ranks"
    return SaveFailed(
        f"the checkpoint at step {save.proposal.header.step} was given up: nothing was heard of it "
        f"for {seconds:.3g} s (timeout_seconds={save.patience.timeout_seconds:g}); {waits}. Its "
        "rows are kept for the next one; look at the storage and the other ranks, and save again"
    )
