"""Report a restore to the log and to the caller."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.format.losses import portion
from torchrec_checknrun.ranks import ranks_text
from torchrec_checknrun.recovery.saves import Saves
from torchrec_checknrun.recovery.survival import Recovered
from torchrec_checknrun.restore.restore import Restored
from torchrec_checknrun.root.report import RankSource, RestoreReport

_MOST_LINES = 20
"""Lines of a kind that a restore logs: a model may have thousands of tables."""


def report_restored(
    saver: Saves, found: Restored, before: Quantization, now: Quantization, seconds: float
) -> RestoreReport:
    """Log and return the restored, skipped and passed-over parts.

    Args:
        before, now: the quantization before and after: restores from quantized rows are counted,
            and too many of them raise the width.
        seconds: the duration of the restore.
    """
    if now != before:
        saver.log(
            "restored %d times from quantized rows, more often than expected_restores=%g: rows are "
            "stored with 8 bits from now on, beginning with a full checkpoint",
            saver.lineage.lossy_restores,
            now.expected_restores,
            level=logging.WARNING,
        )
    head = found.chain.head
    _tell(saver, "skipped", found.skipped)
    _tell(saver, "passed_over", found.passed_over)
    if found.unread:
        saver.log(
            "%s may be sound: this run deletes nothing of that, a later one does, unless "
            "`checknrun pin` keeps it",
            ", ".join(found.unread),
            level=logging.WARNING,
        )
    if found.forks and not found.passed_over:
        saver.log(
            "checkpoints newer than %s are there: as soon as this run saves they are an abandoned "
            "fork, which retention deletes first; `checknrun pin` keeps one",
            head.id,
            level=logging.WARNING,
        )
    of_memory = f", {found.memory_bytes:,} bytes from memory" if found.memory_bytes else ""
    saver.log("restored %s (step %d) in %.2f s%s", head.id, head.step, seconds, of_memory)
    return RestoreReport(
        id=head.id,
        step=head.step,
        sequence=head.sequence,
        chain=tuple(manifest.id for manifest in found.chain.manifests),
        passed_over=tuple(found.passed_over),
        lossy=found.chain.lossy,
        seconds=seconds,
        skipped=tuple(found.skipped),
        pls=portion(head.losses),
        reproducible=not head.losses,
        memory_bytes=found.memory_bytes,
    )


def report_recovered(saver: Saves, found: Recovered, seconds: float) -> RestoreReport:
    """Log and return what images have brought back.

    Args:
        seconds: the duration of the restore.
    """
    _tell(saver, "passed_over", found.passed_over)
    sources = _sources(found)
    if found.lost:
        _tell_of_lost(saver, found)
    saver.log("went on from images in memory at step %d, in %.2f s", found.step, seconds)
    head = None if found.chain is None else found.chain.head
    manifests = () if found.chain is None else found.chain.manifests
    return RestoreReport(
        id="" if head is None else head.id,
        step=found.step,
        sequence=0 if head is None else head.sequence,
        chain=tuple(manifest.id for manifest in manifests),
        passed_over=found.passed_over,
        lossy=bool(found.lost) and found.chain is not None and found.chain.lossy,
        seconds=seconds,
        source="both" if found.lost else "images",
        ranks=sources,
        pls=portion(found.losses),
        reproducible=not found.losses,
    )


def _sources(found: Recovered) -> tuple[RankSource, ...]:
    """Return each rank's source; none where all have gone on by their images."""
    if not found.lost or found.chain is None:
        return ()
    since = found.chain.head.step
    return tuple(
        RankSource("images", found.step)
        if rank not in found.lost
        else RankSource("peer" if rank in found.from_peers else "checkpoint", since)
        for rank in range(found.world_size)
    )


def _tell_of_lost(saver: Saves, found: Recovered) -> None:
    assert found.chain is not None
    head = found.chain.head
    saver.log(
        "partial recovery: %s had no image and went on with rows of step %d, of %s; all others "
        "kept theirs, of step %d. The portion of lost samples is %.3g so far; this run can't be "
        "repeated bit for bit any more",
        ranks_text(found.lost),
        head.step,
        head.id,
        found.step,
        portion(found.losses),
        level=logging.WARNING,
    )


def _tell(saver: Saves, field: str, lines: Sequence[str]) -> None:
    """Log lines of a field of the report, the first of many."""
    for line in lines[:_MOST_LINES]:
        saver.log("%s: %s", field.replace("_", " "), line, level=logging.WARNING)
    if (more := len(lines) - _MOST_LINES) > 0:
        saver.log("and %d more, in the report's %s", more, field, level=logging.WARNING)
