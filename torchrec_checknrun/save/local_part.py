"""Follow one rank's part of a checkpoint from the cut to its plan, the first work of the
background.

Made by the training thread at the cut; all else happens in the background's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from torchrec_checknrun.codecs import Settled, Surveys
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.save.parent_content import ParentContent
from torchrec_checknrun.save.plan import PlanSummary, Prepared
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.snapshot.items import Item, RowsItem, fingerprint
from torchrec_checknrun.snapshot.late_copies import LateCopies
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot
from torchrec_checknrun.snapshot.staging import Staging
from torchrec_checknrun.threads import BEHIND_TRAINING, ReadyThread, lower_priority


class LocalPart:
    """One rank's part of a checkpoint, or the error that prevents it."""

    def __init__(self, save: Save, differences: RankDifferences) -> None:
        self.staging: Staging | None = None
        self.summarize: Callable[[], PlanSummary] | None = None
        self.find_rows: Callable[[], dict[str, RowsItem]] = dict
        """Finds the items of the rows that are copied on write."""
        self.survey_rows: Callable[[Surveys], object] = lambda found: None
        """Adds surveys of these rows."""
        self.kept: object = None
        """Freed behind training: to free tensors lets the background have the interpreter."""
        self.late: LateCopies | None = None
        """Ended with this part, however early that fails."""
        self.ready_copier: ReadyThread | None = None
        self._copier: threading.Thread | None = None
        self._save = save
        self._differences = differences
        self.parent_content = ParentContent("whole")
        """Makes differences of what lies beside rows."""
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Set the error that stops this rank's part."""
        self._failure = error
        if self.staging is not None:
            self.staging.fail(error)
        self._save.end_protection()

    def end(self) -> None:
        """End protection of rows and the thread that copies them, which gets no more memory; free
        what would else be freed by training.
        """
        self._save.end_protection()
        if self._copier is not None:
            self._copier.join()
        if self.staging is not None and self.staging.reads is not None:
            self.staging.reads.end()
        if self.late is not None:
            self.late.end()
            self._save.progress.protection.seconds += self.late.seconds
        rows, self._save.rows, self.kept, self.summarize = self._save.rows, None, None, None
        if rows is not None:
            rows.release()

    def make_late_copies(self) -> None:
        """Get ready to copy rows, and copy what an optimizer's step would else have to copy; the
        background's first work.
        """
        if self._failure is not None:
            return
        assert self.staging is not None
        try:
            if self._save.rows is not None:
                self._save.rows.make_ready()
            if self.staging.late is not None:
                self.staging.late.make()
        except Exception as error:
            self.fail(error)

    def unite(self, ranks: Ranks) -> None:
        """Unite the ranks' marks of data-parallel tables; a collective, even if a rank failed."""
        known: list[tuple[ShardSnapshot, torch.Tensor]] = []
        united = torch.empty(0, dtype=torch.uint8)
        if self._failure is None:
            assert self.staging is not None
            try:
                replicas = [s for s in self.staging.later if s.copies is None]
                known = [(s, own) for s in replicas if (own := s.own_rows()) is not None]
                united = torch.cat([united, *(own for _, own in known)])
            except Exception as error:
                self.fail(error)
        if not all(ranks.gather(self._failure is None)) or not known:
            return
        dist.all_reduce(united, op=dist.ReduceOp.BOR, group=ranks.group)
        for (snapshot, _), rows in zip(
            known, united.split([len(own) for _, own in known]), strict=True
        ):
            snapshot.unite(rows)

    def prepare(self) -> Prepared:
        """Return this rank's part, for ``save_checkpoint``.

        Raises:
            BaseException: the error passed to ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        assert self.staging is not None
        assert self.summarize is not None
        summary, self.summarize = self.summarize(), None
        items: dict[str, Item] = dict(self.staging.at_cut)
        if self.staging.later:
            found = self.find_rows()
            # Before other rows take overflow memory: a sample may take memory beyond it.
            self.survey_rows(summary.surveys)
            items |= found
            ready, self.ready_copier = self.ready_copier, None
            self._copier = self.staging.start_behind(found, self._save.rows, ready)
        digests = self.staging.digests()
        self._save.fingerprint = fingerprint(digests, summary.progress)
        summary = summary.with_digests(digests, self.staging.shared_digests())
        links = self._save.links
        own = dict if links is None else links.digests
        return Prepared(summary, items, self._differences, self._jobs, own)

    def _jobs(self, names: Sequence[str], settled: Settled) -> Iterator[Job]:
        assert self.staging is not None
        # The file's thread, which starts now, inherits it. Not the copier: training copies what it
        # changes before the copier has.
        lower_priority(BEHIND_TRAINING)
        jobs = self.staging.jobs(names, settled)
        return self.parent_content.jobs(self._save.proposal, jobs)
