"""Break what ``test_sequences`` must notice: marks, copies, protection, the choice of a kind.

Protection is broken by ``tests.crash.sabotage.protection``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.crash.sabotage import protection
from torchrec_checknrun import Intermittent
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.run import restoring
from torchrec_checknrun.snapshot.staged import StagedRows
from torchrec_checknrun.store.folder import Folder

Sabotage = Callable[[pytest.MonkeyPatch], None]


def _no_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrackedModel, "merge", lambda *_: None)


def _no_marks_after_restore(patch: pytest.MonkeyPatch) -> None:
    restore = restoring.restore

    def restore_and_forget(root: Folder, target: Target, *args: Any) -> Any:
        found = restore(root, target, *args)
        target.tracked.clear(Consumer.BASELINE)
        return found

    patch.setattr(restoring, "restore", restore_and_forget)


def _no_copies(patch: pytest.MonkeyPatch) -> None:
    """Take rows out of the live tables when they are encoded, not when they are staged."""
    copy, encode = StagedRows.copy, StagedRows.encode
    live_rows: dict[int, tuple[Any, ...]] = {}

    def remember(rows: StagedRows, *source: Any) -> None:
        live_rows[rows.ids.offset] = source
        copy(rows, *source)

    def encode_live(rows: StagedRows, memory: Any) -> Any:
        copy(rows, *live_rows[rows.ids.offset])
        return encode(rows, memory)

    patch.setattr(StagedRows, "copy", remember)
    patch.setattr(StagedRows, "encode", encode_live)


def copy_slowly(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give training time to overwrite rows that are still to be copied."""
    stage = ShardCopies.stage

    def wait_and_stage(copies: ShardCopies, *arguments: Any) -> None:
        time.sleep(seconds)
        stage(copies, *arguments)

    patch.setattr(ShardCopies, "stage", wait_and_stage)


def _unprotected(drop: Callable[[protection.Put, protection.Tell], None]) -> Sabotage:
    """Make a sabotage of one that the demo's trainer knows, too."""
    return lambda patch: drop(patch.setattr, lambda _: None)


def _held_back(patch: pytest.MonkeyPatch) -> None:
    protection.hold_back(patch.setattr)


def _never_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intermittent, "decide", lambda *_: Decision.SINCE_BASELINE)


def _always_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intermittent, "decide", lambda *_: Decision.FULL)


def _anew_too_late(patch: pytest.MonkeyPatch) -> None:
    """Let the predictor forget sizes that a restore of the last checkpoint does not read."""
    decide = Intermittent.decide

    def decide_from_the_last(policy: Intermittent, history: Sequence[Manifest]) -> Decision:
        return decide(policy, [replace(one, earlier_fractions=()) for one in history])

    patch.setattr(Intermittent, "decide", decide_from_the_last)


LOSES_ROWS: dict[str, Sabotage] = {
    "marks of a failed save are lost": _no_merge,
    "marks since the baseline are lost": _no_marks_after_restore,
    "staging is no copy": _no_copies,
}
LOSES_PROTECTION: dict[str, Sabotage] = {
    "no row is protected": _unprotected(protection.nothing),
    "one table is not protected": _unprotected(protection.one_table),
    "one state is not protected": _unprotected(protection.one_state),
    "the second feature is not protected": _unprotected(protection.second_feature),
    "dense parameters are not protected": _unprotected(protection.dense_parameters),
    "states of dense optimizers are not protected": _unprotected(protection.dense_states),
}
HARMLESS: dict[str, Sabotage] = {"the background is held back": _held_back}
DECIDES_WRONGLY: dict[str, Sabotage] = {
    "the predictor never begins anew": _never_anew,
    "the predictor always begins anew": _always_anew,
    "the predictor forgets": _anew_too_late,
}
SABOTAGE = LOSES_ROWS | LOSES_PROTECTION | HARMLESS | DECIDES_WRONGLY
