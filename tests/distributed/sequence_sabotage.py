"""Break what ``test_sequences`` must notice: marks, copies, protection, the choice of a kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from torchrec_checknrun import Intermittent
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.row_copies import KernelCopies, ShardCopies
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.run import checkpointer
from torchrec_checknrun.snapshot.items import RowsItem
from torchrec_checknrun.snapshot.staged import StagedChunk, StagedRows
from torchrec_checknrun.snapshot.staging import Staging
from torchrec_checknrun.store.folder import Folder


def _no_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrackedModel, "merge", lambda *_: None)


def _no_marks_after_restore(patch: pytest.MonkeyPatch) -> None:
    restore = checkpointer.restore

    def restore_and_forget(root: Folder, target: Target, *args: Any) -> Any:
        found = restore(root, target, *args)
        target.tracked.clear(Consumer.BASELINE)
        return found

    patch.setattr(checkpointer, "restore", restore_and_forget)


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


def _protect_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KernelCopies, "before_update", lambda *_: None)


def _protect_one_table_less(patch: pytest.MonkeyPatch) -> None:
    protect = KernelCopies.before_update

    def protect_others(copies: Any, values: Any, offsets: list[int], tables: list[int]) -> None:
        protect(copies, values, offsets, [table or -1 for table in tables])

    patch.setattr(KernelCopies, "before_update", protect_others)


def _protect_no_state(patch: pytest.MonkeyPatch) -> None:
    """Take optimizer rows out of the live table, when weights are those of the cut."""
    stage = ShardCopies.stage

    def stage_live(copies: ShardCopies, rows: Any, start: int, memory: Any, at: list[int]) -> None:
        stage(copies, rows, start, memory, at)
        for tensor, offset in zip(copies._tensors[1:], at[2:], strict=True):
            live = tensor[rows].contiguous().view(-1).view(torch.uint8)
            memory[offset : offset + live.numel()] = live

    patch.setattr(ShardCopies, "stage", stage_live)


def _protect_first_features(patch: pytest.MonkeyPatch) -> None:
    protect = KernelCopies.before_update

    def protect_first(copies: Any, values: Any, offsets: list[int], tables: list[int]) -> None:
        first = [-1 if table in tables[:i] else table for i, table in enumerate(tables)]
        protect(copies, values, offsets, first)

    patch.setattr(KernelCopies, "before_update", protect_first)


def _no_copy_of_parameters(patch: pytest.MonkeyPatch) -> None:
    """Write dense parameters as they are when the file is written."""
    take = Staging._take

    def take_live(staging: Staging, item: Any, when_full: Any) -> Any:
        stage, offset = take(staging, item, when_full)
        if not isinstance(item, RowsItem):
            live[offset] = item
        return stage, offset

    def pieces(chunk: StagedChunk, memory: Any) -> Any:
        item = live.get(chunk.data.offset)
        if item is None:
            return staged_pieces(chunk, memory)
        time.sleep(0.3)  # training's next steps
        return item.job({}).pieces

    live: dict[int, Any] = {}
    staged_pieces = StagedChunk.pieces
    patch.setattr(Staging, "_take", take_live)
    patch.setattr(StagedChunk, "pieces", pieces)


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


Sabotage = Callable[[pytest.MonkeyPatch], None]
LOSES_ROWS: dict[str, Sabotage] = {
    "marks of a failed save are lost": _no_merge,
    "marks since the baseline are lost": _no_marks_after_restore,
    "staging is no copy": _no_copies,
}
LOSES_PROTECTION: dict[str, Sabotage] = {
    "no row is protected": _protect_nothing,
    "one table is not protected": _protect_one_table_less,
    "one state is not protected": _protect_no_state,
    "the second feature is not protected": _protect_first_features,
    "dense parameters are not copied": _no_copy_of_parameters,
}
DECIDES_WRONGLY: dict[str, Sabotage] = {
    "the predictor never begins anew": _never_anew,
    "the predictor always begins anew": _always_anew,
    "the predictor forgets": _anew_too_late,
}
SABOTAGE = LOSES_ROWS | LOSES_PROTECTION | DECIDES_WRONGLY
