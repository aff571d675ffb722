"""Write and commit a checkpoint: one file per rank that ends in its own index, the manifest last.

``save_checkpoint`` is the engine of every save: the ranks plan, write and commit together, and an
error on one rank is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from msgspec.structs import replace

from torchrec_checknrun.errors import (
    CheckpointExists,
    CorruptCheckpoint,
    InvalidPlan,
    SaveFailed,
)
from torchrec_checknrun.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    TableTotals,
    is_plain_name,
    require_sequence,
)
from torchrec_checknrun.format.rank_file import (
    FileSummary,
    Job,
    WriteRankFile,
    add_totals,
    write_rank_file,
)
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.chain import check_sizes
from torchrec_checknrun.root.checkpoints import highest_sequence
from torchrec_checknrun.root.claims import latest_claim
from torchrec_checknrun.root.lineage import note_number
from torchrec_checknrun.save.plan import GlobalPlan, LocalPlan, Prepared, Share, make_global_plan
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import gc_paused
from torchrec_checknrun.version import __version__


def save_checkpoint(
    ranks: Ranks, writer: CheckpointWriter, prepare: Callable[[], Prepared]
) -> Manifest:
    """Plan, write and commit one checkpoint. A collective.

    Args:
        prepare: returns this rank's part of the checkpoint.

    Returns:
        The manifest, on all ranks.

    Raises:
        Exception: an error of any rank, the same on all ranks; see ``Ranks.reduce``.
    """
    prepared: Prepared | None = None
    whole: GlobalPlan | None = None

    def plan() -> LocalPlan:
        nonlocal prepared
        prepared = prepare()
        writer.check(ranks.rank == 0)
        return prepared.local_plan

    def share_out(plans: list[LocalPlan]) -> list[Share]:
        nonlocal whole
        assert prepared is not None
        shares, whole = make_global_plan(plans, prepared.differences)
        writer.create()
        return shares

    share = ranks.reduce_scatter(plan, share_out)

    def write() -> FileSummary:
        assert prepared is not None
        return writer.write(ranks.rank, prepared.jobs(share))

    def commit(summaries: list[FileSummary]) -> Manifest:
        assert whole is not None
        return writer.commit(whole, summaries)

    return ranks.reduce(write, commit)


class CheckpointWriter:
    """A writer of one checkpoint into a directory of its own.

    Args:
        folder: the checkpoint's directory, which must be empty or missing. Differential checkpoints
            must lie beside their parents.
        write: a function that writes a rank's file.
        before_commit: called on rank 0; raises an error if the commit must not happen.
        after_commit: called on rank 0; raises an error if the commit doesn't count.

    Attributes:
        folder: the checkpoint's directory.
        written: a summary of this rank's file; None until it is written.
    """

    def __init__(
        self,
        folder: Folder,
        write: WriteRankFile = write_rank_file,
        before_commit: Callable[[], object] = lambda: None,
        after_commit: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self.written: FileSummary | None = None
        self._write = write
        self._before_commit = before_commit
        self._after_commit = after_commit

    def check(self, on_rank_0: bool) -> None:
        """Check the directory before anything is written; only rank 0 lists its files.

        Raises:
            InvalidPlan: the directory's name is not allowed.
            CheckpointExists: the directory holds files, which could be mistaken for new ones.
        """
        if not is_plain_name(self.folder.name):
            raise InvalidPlan(
                f"{self.folder} can't be a checkpoint: its name {self.folder.name!r} must have 1 "
                "to 255 characters without backslash, '::' and control characters"
            )
        if on_rank_0 and (names := self.folder.names()):
            raise CheckpointExists(
                f"{self.folder} already holds {names[:3]}: a checkpoint directory is written "
                "once; save into a new one, or remove it if it is not needed"
            )

    def create(self) -> None:
        """Create the directory durably, on rank 0."""
        self.folder.create()
        self.folder.sync()

    def write(self, rank: int, jobs: Iterator[Job]) -> FileSummary:
        """Write a rank's file, durably."""
        self.folder.create()
        self.written = self._write(self.folder, rank, jobs)
        return self.written

    @gc_paused()
    def commit(self, plan: GlobalPlan, summaries: Sequence[FileSummary]) -> Manifest:
        """Commit on rank 0, once all files are durable: the manifest makes the checkpoint exist.

        Args:
            summaries: of the written files, by rank.

        Raises:
            InvalidPlan: a rank has written other chunks than planned.
            SaveFailed: the checkpoint was not committed, or its files are gone.
        """
        written = tuple(summary.file.chunks for summary in summaries)
        if written != plan.chunks:
            raise InvalidPlan(f"ranks were to write {plan.chunks} chunks, but wrote {written}")
        manifest = self._manifest(plan, summaries)
        root, explicit = self.folder.parent, plan.header.epoch is not None
        self._before_commit()
        self._check_files(manifest, "while it was written")
        data = manifest.to_bytes()
        self.folder.put(MANIFEST_NAME, data, new=True)
        note_number(root, manifest.sequence)
        # Between the last look and the put this process may have been stopped for hours.
        self._check_files(manifest, "while it was committed")
        if self.folder.read(MANIFEST_NAME) != data:
            raise SaveFailed(f"{self.folder}/{MANIFEST_NAME} is not the one written here")
        claim = None if explicit else latest_claim(root)
        if claim is not None and not claim.admits(manifest.id, manifest.epoch):
            raise SaveFailed(
                f"a writer claimed {root} while {manifest.id} was committed, which therefore "
                "doesn't count: save again, into another directory"
            )
        self._after_commit()
        return manifest

    def _manifest(self, plan: GlobalPlan, summaries: Sequence[FileSummary]) -> Manifest:
        """Make the manifest; a checkpoint without a number gets the root's next one."""
        header = plan.header
        root, sequence, epoch = self.folder.parent, header.sequence, header.epoch
        if sequence is None:
            sequence = highest_sequence(root) + 1
            require_sequence(sequence)
        if epoch is None:
            epoch = claim.epoch if (claim := latest_claim(root)) else 0
        return Manifest(
            id=self.folder.name,
            sequence=sequence,
            step=header.step,
            kind=header.kind,
            parent=header.parent,
            previous=header.previous,
            world_size=len(summaries),
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            created_by=f"torchrec_checknrun {__version__}",
            lossy_restores=header.lossy_restores,
            bits=header.bits,
            tables=_sum_tables(plan, [summary.tables for summary in summaries]),
            states=plan.states,
            dense_bytes=sum(summary.dense_bytes for summary in summaries),
            files=tuple(summary.file for summary in summaries),
            earlier_fractions=header.earlier_fractions,
            lineage=header.lineage,
            epoch=epoch,
        ).sealed()

    def _check_files(self, manifest: Manifest, when: str) -> None:
        """Check that the files still have their sizes.

        Raises:
            SaveFailed: files are gone, which somebody may have taken for leftovers.
        """
        try:
            check_sizes(self.folder.parent, manifest)
        except CorruptCheckpoint as error:
            raise SaveFailed(
                f"files of {manifest.id} went away {when}: {error}. Leave deleting to `retention` "
                "or `checknrun prune`"
            ) from error


def _sum_tables(plan: GlobalPlan, parts: list[dict[str, TableTotals]]) -> dict[str, TableTotals]:
    totals = {name: TableTotals(shape.rows, shape.dim) for name, shape in plan.tables.items()}
    # Rank by rank, as in memory: a thousand ranks' parts exceed every processor's cache.
    for part in parts:
        for name, of_rank in part.items():
            if name in totals:
                totals[name] = add_totals(totals[name], of_rank)
    for name, total in totals.items():
        progress = plan.progress.get(name)
        totals[name] = replace(
            total,
            fp32_bytes=plan.fp32_bytes[name],
            optimizer_step=progress.step if progress else None,
            learning_rate=progress.learning_rate if progress else None,
            optimizer_options=dict(progress.options) if progress else {},
        )
    return totals
