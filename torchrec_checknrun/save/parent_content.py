"""Write what lies beside table rows as differences to the parent checkpoint, where that is smaller.

A rank keeps what it wrote for the last checkpoint that the next one may build on, in memory. Where
it has nothing to compare with (after a restore, or another rank wrote that part), a chunk is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from msgspec.structs import replace

from torchrec_checknrun.format.difference import WIDTHS, difference
from torchrec_checknrun.format.entries import BlockEntry, Entry, RowsEntry
from torchrec_checknrun.format.manifest import Link, Manifest
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.format.reader import dense_key
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.snapshot.staged import StagedChunk, StagedJob, StagedTensor
from torchrec_checknrun.values.state import TORCH_DTYPES

DenseForm = Literal["difference", "whole"]
MOST_BYTES = 1 << 30
"""The most that a rank keeps in memory for the next checkpoint; more is written whole."""
_STATE_WIDTH = 4
"""Bytes of most values in states: of fp32."""


class ParentContent:
    """The content that one rank wrote beside table rows, for the checkpoint that the next one
    builds on.

    Args:
        form: whether anything is written as a difference.
    """

    def __init__(self, form: DenseForm = "difference") -> None:
        self._form = form
        self._of: Link | None = None
        self._held: dict[object, bytes] = {}
        self._begun: dict[object, bytes] = {}
        self._follows = False
        """True if the next checkpoint may build on the one that is being written."""

    def jobs(self, proposal: Proposal, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield a checkpoint's jobs, with differences for what the parent holds."""
        if self._form == "whole":
            yield from jobs
            return
        parent = proposal.header.parent
        held = self._held if parent is not None and parent == self._of else {}
        self._begun, self._follows = {}, proposal.decision is not Decision.SINCE_BASELINE
        left = MOST_BYTES
        for job in jobs:
            if not isinstance(job, StagedJob) or not isinstance(job.staged, StagedChunk):
                yield job
                continue
            key = dense_key(job.staged.entry)
            if key is None:  # rows that were encoded at the cut
                yield job
                continue
            (content,) = job.staged.pieces(job.memory)
            left -= len(content)
            if self._follows and left >= 0:
                self._begun[key] = bytes(content)
            yield _smaller(job, job.staged, memoryview(content), held.get(key))

    def committed(self, manifest: Manifest) -> None:
        """Keep what was written, now that it is known to be committed."""
        if self._follows:
            self._of, self._held = manifest.link, self._begun
        self._begun = {}

    def failed(self) -> None:
        """Forget what was written."""
        self._begun = {}


def _smaller(
    job: StagedJob, staged: StagedChunk, content: memoryview, parent: bytes | None
) -> StagedJob:
    """Return a job of the smaller form; a difference takes the content's place in memory."""
    if parent is None:
        return job
    found = difference(content, memoryview(parent), _width(staged.entry))
    if found is None:
        return job
    data, known = found
    content[: len(data)] = data
    assert not isinstance(staged.entry, RowsEntry)
    entry = replace(staged.entry, difference=known)
    place = StagedTensor(staged.data.offset, torch.uint8, (len(data),))
    return dataclasses.replace(job, staged=StagedChunk(entry, place))


def _width(entry: Entry) -> int:
    if not isinstance(entry, BlockEntry):
        return _STATE_WIDTH
    size = TORCH_DTYPES[entry.dtype].itemsize
    return size if size in WIDTHS else 1
