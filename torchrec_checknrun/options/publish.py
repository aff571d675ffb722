"""Say what is published of a run, where and how often; refuse what no follower could serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.errors import UnsupportedState, UnsupportedTable
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.root.counting import require_apart
from torchrec_checknrun.store.folder import Folder

if TYPE_CHECKING:
    from torchrec_checknrun.options.options import Options

WIDTHS = (2, 4, 8, 32)
METHODS = ("asymmetric", "adaptive")


@dataclass(frozen=True)
class Publish:
    """A rule for publications: small checkpoints of what a prediction depends on, for followers.

    Attributes:
        root: a folder or URL of their own, outside of the checkpoints' root.
        every_seconds: time between the beginnings of two, by rank 0's clock.
        bits: of a value: 8, 4 or 2; 32, or None, for rows as they are.
        method: ``asymmetric``, as TorchRec quantizes; ``adaptive``, closer to the values at 4 and 2
            bits, in the same layout.
        tables: patterns of the tables to publish (``fnmatch``, on the state dict's name without
            ``.weight``); None: all.
        keep: publications to keep, with what they build on. Others are deleted once no follower
            reads them.

    Raises:
        ValueError: an argument is out of range.
    """

    root: str | os.PathLike[str]
    every_seconds: float = 30.0
    bits: int | None = 8
    method: str = "asymmetric"
    tables: Sequence[str] | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        root: object = self.root
        if not isinstance(root, (str, os.PathLike)) or not str(os.fspath(root)).strip():
            raise ValueError(
                f'publish: root must be a folder or URL such as "s3://bucket/serve", not {root!r}'
            )
        seconds: object = self.every_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 < self.every_seconds < float("inf"):
            raise ValueError(
                f"publish: every_seconds must be a positive number such as 30, not {seconds!r}"
            )
        bits: object = self.bits
        if bits is not None and (type(bits) is not int or bits not in WIDTHS):
            raise ValueError(
                f"publish: bits must be one of {WIDTHS}, or None for rows as they are, not {bits!r}"
            )
        if self.method not in METHODS:
            raise ValueError(f"publish: method must be one of {METHODS}, not {self.method!r}")
        tables: object = self.tables
        if tables is not None and (
            isinstance(tables, (str, bytes))
            or not isinstance(tables, Sequence)
            or not all(isinstance(name, str) for name in tables)
        ):
            raise ValueError(
                f'publish: tables must be a list of patterns such as ["*.user"], not {tables!r}'
            )
        if type(self.keep) is not int or self.keep < 1:
            raise ValueError(f"publish: keep must be at least 1, an int, not {self.keep!r}")

    @property
    def quantization(self) -> Quantization:
        """Return the quantization of published rows."""
        if self.bits in (None, 32):
            return Quantization()
        return Quantization(bits=self.bits, method=self.method)

    def folder(self, timeout_seconds: float) -> Folder:
        """Return the publications' root."""
        return Folder(self.root, timeout_seconds)

    def chosen(self, tables: Sequence[str]) -> frozenset[str]:
        """Choose the tables to publish among a model's.

        Raises:
            UnsupportedTable: a pattern matches none.
        """
        if self.tables is None:
            return frozenset(tables)
        found: set[str] = set()
        for pattern in self.tables:
            matching = {name for name in tables if fnmatchcase(name, pattern)}
            if not matching:
                raise UnsupportedTable(
                    f"publish: tables has {pattern!r}, which is no table of the model; it has "
                    f"{listed(sorted(tables))}"
                )
            found |= matching
        return frozenset(found)


def check_publishable(options: Options, tracked: TrackedModel, world_size: int) -> None:
    """Refuse a model of which a prediction depends on something that can't be followed.

    Raises:
        UnsupportedTable: there is no table to publish.
        UnsupportedState: names a buffer.
        ValueError: the publications' root is not apart from the checkpoints'.
    """
    assert options.publish is not None
    require_apart(options.root, options.publish.folder(options.timeout_seconds))
    chosen = options.publish.chosen(list(tracked.tables))
    if not chosen:
        raise UnsupportedTable("publish: the model has no table to publish")
    own = sorted(options.per_rank_buffers.take(dict(tracked.dense.find().dense)))
    if own and world_size > 1:
        raise UnsupportedState(
            f"publish: each rank has its own {listed(own)} (per_rank_buffers), and a served model "
            "has one: leave them out of per_rank_buffers to publish rank 0's"
        )
