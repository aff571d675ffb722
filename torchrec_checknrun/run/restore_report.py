"""Report a restore to the log and to the caller."""

from __future__ import annotations

import logging

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.restore.restore import Restored
from torchrec_checknrun.root.report import RestoreReport
from torchrec_checknrun.run.saver import Saver
from torchrec_checknrun.run.survival import Recovered


def report_restored(
    saver: Saver, found: Restored, before: Quantization, seconds: float
) -> RestoreReport:
    """Log and return the restored, skipped and passed-over parts.

    Args:
        before: the quantization until now: restores from quantized rows are counted, and too many
            of them raise the width.
        seconds: the duration of the restore.
    """
    if saver.quantization != before:
        saver.log(
            "restored %d times from quantized rows, more often than expected_restores=%g: rows are "
            "stored with 8 bits from now on, beginning with a full checkpoint",
            saver.lineage.lossy_restores,
            saver.quantization.expected_restores,
            level=logging.WARNING,
        )
    head = found.chain.head
    for what in found.skipped:
        saver.log("skipped: %s", what, level=logging.WARNING)
    for problem in found.passed_over:
        saver.log("passed over: %s", problem, level=logging.WARNING)
    saver.log("restored %s (step %d) in %.2f s", head.id, head.step, seconds)
    return RestoreReport(
        id=head.id,
        step=head.step,
        sequence=head.sequence,
        chain=tuple(manifest.id for manifest in found.chain.manifests),
        passed_over=tuple(found.passed_over),
        lossy=found.chain.lossy,
        seconds=seconds,
        skipped=tuple(found.skipped),
    )


def report_recovered(saver: Saver, found: Recovered, seconds: float) -> RestoreReport:
    """Log and return what images have brought back.

    Args:
        seconds: the duration of the restore.
    """
    for problem in found.passed_over:
        saver.log("passed over: %s", problem, level=logging.WARNING)
    saver.log("went on from images in memory at step %d, in %.2f s", found.step, seconds)
    head = None if found.chain is None else found.chain.head
    manifests = () if found.chain is None else found.chain.manifests
    return RestoreReport(
        id="" if head is None else head.id,
        step=found.step,
        sequence=0 if head is None else head.sequence,
        chain=tuple(manifest.id for manifest in manifests),
        passed_over=found.passed_over,
        lossy=False,
        seconds=seconds,
        source="images",
    )
