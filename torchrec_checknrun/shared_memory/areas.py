"""Share out an image's file: its first pages, and areas by name that can grow."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.shared_memory.file import ImageFile, NoImage, owner_text, this_process
from torchrec_checknrun.shared_memory.header import (
    FIRST_BYTES,
    LAYOUT_BYTES,
    LINEAGE_BYTES,
    MAGIC,
    PAGE,
    Record,
    Word,
    Words,
)


class Layout(msgspec.Struct, frozen=True):
    """The subject of an image, and the places of its areas.

    Attributes:
        run: names the run and the rank.
        shards: a digest of the rank's shards and their memory.
        incarnation: the same in all images that were begun together.
        areas: offset and size by name.
    """

    run: str
    shards: str
    incarnation: str
    areas: dict[str, tuple[int, int]]


class Attempt(msgspec.Struct, frozen=True):
    """A checkpoint that was begun and is not known to be committed.

    Attributes:
        id: of the checkpoint.
        interval: the one that ended with its cut.
        full: whether it holds all rows.
        ahead_of: the step that was done when it was begun, if it may hold what was changed since.
    """

    id: str
    interval: int
    full: bool
    ahead_of: int = -1


class Descent(msgspec.Struct, frozen=True):
    """The knowledge of a rank about its checkpoints.

    Attributes:
        lineage: the lineage's name.
        head: the id of the checkpoint that was committed or restored last; None: none was.
        last, baseline: the intervals that ended with the cuts of the last checkpoint and of the
            last full one.
        interval: the present one.
        attempts: checkpoints begun since, oldest first.
        lossy_restores: restores from lossy checkpoints so far.
        must_be_full: whether the next checkpoint must be full.
        losses: what partial recoveries have cost so far.
        ahead_of: of the head, see ``Attempt``.
    """

    lineage: str
    head: str | None
    last: int
    baseline: int
    interval: int
    attempts: tuple[Attempt, ...]
    lossy_restores: int
    must_be_full: bool
    losses: tuple[Loss, ...] = ()
    ahead_of: int = -1


class Areas:
    """An image's file with its words, records and areas.

    Attributes:
        words, descent: in the file.
        layout: as last written or read.
    """

    layout: Layout

    def __init__(self, file: ImageFile) -> None:
        self._file = file
        first = file.map(0, FIRST_BYTES)
        self.words = Words(first[:PAGE])
        self._record = Record(first[PAGE : PAGE + LAYOUT_BYTES], Layout)
        self.descent = Record(first[FIRST_BYTES - LINEAGE_BYTES :], Descent)
        self._maps: dict[str, torch.Tensor] = {}

    @classmethod
    def create(cls, path: Path, layout: Layout) -> Areas:
        """Create a file without any area yet.

        Raises:
            ImagesRefused: see ``ImageFile.create``.
        """
        file = ImageFile.create(path, FIRST_BYTES)
        areas = cls(file)
        areas.layout = layout
        areas._record.write(layout)
        areas.words.clear()
        areas.words.publish(Word.OWNER, this_process())
        areas.words.publish(Word.MAGIC, MAGIC)
        return areas

    @classmethod
    def open(cls, path: Path, run: str, shards: str) -> Areas:
        """Open what an earlier process has left, and become its owner.

        Args:
            run, shards: as in ``Layout``, wanted.

        Raises:
            NoImage: there is none, or none that can be used.
        """
        file = ImageFile.open(path)
        try:
            file.require_memory()
            areas = cls(file)
            if not areas.words.begin_an_image:
                raise NoImage("it does not begin as an image does")
            with file.locked():
                owner = owner_text(areas.words[Word.OWNER])
                if owner is not None:
                    raise NoImage(f"it is used by {owner}, which is alive")
                areas.words.publish(Word.OWNER, this_process())
            areas._check(run, shards)
        except BaseException:
            file.close()
            raise
        return areas

    def _check(self, run: str, shards: str) -> None:
        self.words.verify()
        self.layout = self._record.read()
        if self.layout.run != run:
            raise NoImage("it is of another run or rank")
        if self.layout.shards != shards:
            raise NoImage("it is of other shards than the model has now")
        if self.words[Word.READY] != 1:
            raise NoImage("it was not filled, or was being overwritten")
        spans = sorted(self.layout.areas.values())
        end = FIRST_BYTES
        for offset, size in spans:
            if offset < end or size < 0 or offset + size > self._file.size:
                raise NoImage("its areas overlap, or lie outside of it")
            end = offset + size

    def has(self, name: str) -> bool:
        """Tell whether there is an area of this name."""
        return name in self.layout.areas

    def get(self, name: str) -> torch.Tensor:
        """Return an area's memory, ``(size,)`` uint8.

        Raises:
            NoImage: there is no such area.
        """
        if name not in self._maps:
            if name not in self.layout.areas:
                raise NoImage(f"it has no area {name!r}")
            self._maps[name] = self._file.map(*self.layout.areas[name])
        return self._maps[name]

    def add(self, name: str, size: int) -> torch.Tensor:
        """Make an area, not yet known to readers of the file.

        Raises:
            ImagesRefused: too little memory is left.
        """
        offset = self._file.extend(size)
        self.layout = msgspec.structs.replace(
            self.layout, areas={**self.layout.areas, name: (offset, size)}
        )
        self._maps.pop(name, None)
        return self.get(name)

    def grow(self, name: str, size: int, kept: int) -> torch.Tensor:
        """Replace an area by a larger one with the same first ``kept`` bytes.

        Raises:
            ImagesRefused: too little memory is left; the area is as before.
        """
        old, before = self.get(name), self.layout.areas[name]
        offset = self._file.extend(size)
        new = self._file.map(offset, size)
        new[:kept] = old[:kept]
        layout = msgspec.structs.replace(
            self.layout, areas={**self.layout.areas, name: (offset, size)}
        )
        self._record.write(layout)  # from here on readers find the new one
        self.layout, self._maps[name] = layout, new
        self._file.give_back(*before)
        return new

    def publish(self, incarnation: str) -> None:
        """Write the layout for readers, with this incarnation."""
        self.layout = msgspec.structs.replace(self.layout, incarnation=incarnation)
        self._record.write(self.layout)

    @property
    def path(self) -> Path:
        """Return the file's path."""
        return self._file.path

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def leave(self) -> None:
        """Leave the file to a later process, as it is now."""
        self.words.publish(Word.OWNER, 0)
        try:
            self._file.leave()
        except OSError:  # it can't be left as it is
            self.words.publish(Word.READY, 0)
            self._file.close()

    def remove(self) -> None:
        """Remove the file; memory that tensors use stays until they are gone."""
        self._file.remove()
