"""Restore sharded tensors from stored pieces, however these were cut."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torchrec_checknrun.boxes import Span, tiles
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import BlockHeader, Path, dtype_name, name_of
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.values.state import are_convertible

SavedBlocks = dict[Path, dict[str, BlockHeader]]
"""A checkpoint's pieces, by the tensor's path and the name of the chunk."""


def saved_blocks(headers: Mapping[str, BlockHeader]) -> SavedBlocks:
    """Group a checkpoint's pieces by tensor.

    Args:
        headers: of the pieces, by the name of the chunk.
    """
    saved: SavedBlocks = {}
    for name, header in headers.items():
        saved.setdefault(header.path, {})[name] = header
    return saved


class BlockRestore:
    """A restore of sharded tensors from a checkpoint's pieces.

    Args:
        blocks: the local parts to restore.
        saved: the checkpoint's pieces, see ``saved_blocks``.
        strict: refuse a checkpoint without these tensors; otherwise they stay as they are, listed
            in ``skipped``.

    Attributes:
        skipped: tensors on one side only, or of another size or dtype.
    """

    def __init__(self, blocks: Iterable[Block], saved: SavedBlocks, strict: bool) -> None:
        self._wanted: dict[Path, list[Block]] = {}
        for block in blocks:
            self._wanted.setdefault(block.path, []).append(block)
        self._strict = strict
        self._saved = saved
        self.skipped: list[str] = []

    def plan(
        self,
        where: str,
        asked: Iterable[Any],
        known: Iterable[Path] = (),
        wholly: Container[Any] = (),
    ) -> list[str]:
        """Check the checkpoint's pieces against the local parts.

        Args:
            where: the checkpoint's name in errors.
            asked: the state dict's keys.
            known: paths of tensors that are sharded in the state dict on any rank.
            wholly: keys under which no tensor of the checkpoint may be left out.

        Returns:
            The names of the chunks to read.

        Raises:
            IncompatibleCheckpoint: a tensor is missing on one side, or of another size or dtype.
            CorruptCheckpoint: a piece is missing or malformed.
        """
        others = self._saved.keys() - self._wanted.keys() - set(known)
        keys = set(asked)
        for path in sorted(others, key=str):
            if path[0] not in keys:
                continue
            if self._strict and path[0] not in wholly:
                continue
            if self._strict:
                raise IncompatibleCheckpoint(
                    f"{name_of(path)} is sharded in {where}, and there is no tensor to restore it "
                    "into: restore with the model and state objects it was saved with, with their "
                    "state made, or leave it out with strict=False"
                )
            self.skipped.append(f"state {name_of(path)}: only in the checkpoint")
        needed: dict[str, None] = {}
        for path, blocks in list(self._wanted.items()):
            problem = self._incompatibility(path, blocks[0], where)
            if problem and self._strict:
                raise IncompatibleCheckpoint(
                    f"{name_of(path)} {problem}: restore with the model and state objects it was "
                    "saved with, or keep the live tensor with strict=False"
                )
            if problem:
                self.skipped.append(f"state {name_of(path)} {problem}")
                del self._wanted[path]
                continue
            for block in blocks:
                needed.update(dict.fromkeys(self._needed(block, where)))
        return list(needed)

    def blocks(self) -> Iterator[tuple[Block, tuple[Span, ...]]]:
        """Yield the local shards to restore, as planned, with the saved shards' rows, sorted."""
        for path, blocks in self._wanted.items():
            shards = {header.shard.spans for header in self._saved[path].values()}
            layout = tuple(sorted({spans[0] for spans in shards if spans}))
            for block in blocks:
                yield block, layout

    def load(self, header: BlockHeader, payload: bytes | memoryview) -> None:
        """Write a piece into the local shards that it overlaps."""
        for block in self._wanted.get(header.path, ()):
            block.write(header, memoryview(payload))

    def _incompatibility(self, path: Path, block: Block, where: str) -> str | None:
        if path not in self._saved:
            return f"is not in {where}"
        for header in self._saved[path].values():
            same_type = are_convertible(header.dtype, block.tensor.dtype)
            if header.size != block.size or not same_type:
                return (
                    f"is {header.kind} in {where}, and "
                    f"{dtype_name(block.tensor.dtype)} {list(block.size)} in the model"
                )
        return None

    def _needed(self, block: Block, where: str) -> Iterator[str]:
        common = {
            name: part
            for name, header in self._saved[block.path].items()
            if (part := block.box.intersect(header.box))
        }
        if not tiles(block.box, common.values()):
            found = sum(part.volume for part in common.values())
            raise CorruptCheckpoint(
                f"{where} holds {found} of the {block.box.volume} values of "
                f"{name_of(block.path)}{block.box}, or some twice: pieces are missing"
            )
        yield from common
