"""The interface of a codec: one class to inherit from, so that a new codec is one file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import torch

from torchrec_checknrun.native import copy_rows

WIDTHS = (2, 3, 4, 8)
"""Bits of a code that row-wise quantization offers."""

CodecSpec = dict[str, object]
"""A codec as a chunk's index entry holds it: ``name``, ``version`` and options, each a str, int,
float, bool or None.
"""

_IN_EVERY_SPEC = ("name", "version")

Parameters = dict[str, object]
"""The findings of one encoded block that decoding needs: options as in ``CodecSpec``, or lists of
objects of these.
"""


@dataclass(frozen=True)
class SampledRows:
    """A sample of a shard's rows that are to be written, evenly spaced.

    Attributes:
        weight: ``(n, dim)``, of the table's dtype.
        optimizer: the rows' optimizer state by TorchRec's names, ``(n,)`` or ``(n, dim)``.
        count: number of all rows that are to be written.
    """

    weight: torch.Tensor
    optimizer: Mapping[str, torch.Tensor]
    count: int


Sample = Callable[[int], SampledRows]
"""Copies about so many of a shard's rows that are to be written, as of the checkpoint's instant."""


@dataclass(frozen=True)
class RowContext:
    """Facts that a codec may use beside the rows' values.

    Attributes:
        optimizer: the rows' optimizer state by TorchRec's names, ``(n,)`` or ``(n, dim)``.
        ids: the rows' global ids, ``(n,)`` int64; None if unknown.
    """

    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ids: torch.Tensor | None = None


NO_CONTEXT = RowContext()


@dataclass
class Encoded:
    """A block of rows as bytes.

    Attributes:
        data: contiguous uint8, on the CPU.
        parameters: the block's own; ``decode`` needs these beside the codec's options.
        exceptions: sorted int64 positions of rows outside the codec's error bound (NaN, infinity,
            out of range): the caller must store these exactly, or they are lost.
        restored: returns the rows at given positions, ``(n,)`` int64 sorted, as a restore will;
            None (the default): they are decoded to learn that.
    """

    data: torch.Tensor
    parameters: Parameters
    exceptions: torch.Tensor
    restored: Callable[[torch.Tensor], torch.Tensor] | None = None


class Survey(Protocol):
    """A codec's findings on the rows of some shards; sent to rank 0 by pickle, so keep it small."""

    def merge(self, other: Any) -> None:
        """Add the findings of another survey by an equal codec."""


class Codec(ABC):
    """A way to turn a block of rows into bytes and back.

    A subclass names itself (``name``), says whether it loses anything (``lossy``) and implements
    ``encode``, ``decode``, ``spec`` and ``value_bits``. The other methods are hooks for speed, for
    agreement between ranks or for older versions; each has a default that works for every codec.

    ``codecs.register`` makes a codec from outside of this package readable, and says how a restore
    in another process finds it. Define the class in a module that can be imported: codecs are
    pickled to the process that writes in the background.
    """

    name: ClassVar[str]
    """Unique among all codecs; chunks name their codec by it."""
    version: ClassVar[int] = 1
    """Highest version that this class reads, and the one that it writes."""
    lossy: ClassVar[bool]
    """True if decoded values may differ from the encoded ones."""
    verbatim: ClassVar[bool] = False
    """True if encoded data are the rows' own bytes, row after row: a restore copies such rows
    without decoding.
    """
    surveys: ClassVar[bool] = False
    """True if ranks must ``survey`` their rows and ``settle`` the codec before any row is encoded.
    Such rows are never encoded in the stall.
    """
    at_once: ClassVar[bool] = False
    """True if decoding a part of a block costs as much as the whole: callers decode once, and make
    small blocks, of which a few bytes may stand for any number of rows.
    """
    chained: ClassVar[bool] = False
    """True if rows may be differences to earlier versions: then all chunks of a table are this
    codec's, and a restore reads them in the chain's order.
    """

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Codec:
        """Build the codec that ``spec``, of a version up to the class's, describes; by default its
        options are arguments of the class, which must refuse unknown values: specs are untrusted.

        Raises:
            ValueError, TypeError: an option is unknown, of a wrong type or out of range.
        """
        return cls(**{name: value for name, value in spec.items() if name not in _IN_EVERY_SPEC})

    @abstractmethod
    def spec(self) -> CodecSpec:
        """Return ``name``, ``version`` and all options: enough for ``from_spec``."""

    @property
    @abstractmethod
    def value_bits(self) -> int:
        """Return the bits of one stored value, without the overhead of a row: the codec's width."""

    @abstractmethod
    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        """Encode ``rows[ids]``, or all rows, in one pass.

        Args:
            rows: ``(m, dim)`` floating point, on any device.
            ids: ``(n,)`` int64; which rows, in which order.
            context: facts on the encoded rows.
            out: uint8 memory for the data, used where large enough.
        """

    @abstractmethod
    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        """Decode rows ``start`` to ``start + len(out)`` of a block.

        Args:
            data: 1-D uint8 on the CPU, as ``encode`` returned it.
            parameters: the block's.
            rows: number of rows of the whole block.
            out: ``(n, dim)`` of the dtype that was encoded, on any device.

        Raises:
            ValueError: data or parameters do not belong to such a block.
        """

    def row_bytes(self, dim: int) -> int | None:
        """Return the bytes of an encoded row, if a block is rows of one size and nothing else.

        None (the default) for other codecs.
        """
        return None

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters] | None:
        """Take some rows out of a block, as a block of their own that decodes to the same bits.

        Args:
            data: 1-D uint8 on the CPU, as ``encode`` returned it.
            parameters: the block's.
            rows: number of rows of the block.
            dim: columns of a row.
            positions: ``(n,)`` int64, sorted: which rows.

        Returns:
            The new block's data, 1-D uint8, and its parameters. None (the default without
            ``row_bytes``) if rows cannot be taken out of their block: callers then decode the rows
            between the first and the last that they want.

        Raises:
            ValueError: data or parameters do not belong to such a block.
        """
        size = self.row_bytes(dim)
        return None if size is None else (select_rows(data, rows, size, positions), parameters)

    def family(self, parameters: Parameters, dim: int) -> Hashable | None:
        """Return what blocks have in common that ``join`` can join: all that decoding goes by.

        By default the codec's options and the block's parameters; None, without ``row_bytes``, for
        a block that can't be joined with any other.
        """
        if self.row_bytes(dim) is None:
            return None
        return json.dumps([self.spec(), parameters], sort_keys=True)

    def join(
        self,
        blocks: Sequence[tuple[torch.Tensor, Parameters, int]],
        places: Sequence[torch.Tensor],
        dim: int,
    ) -> tuple[torch.Tensor, Parameters]:
        """Join blocks of one ``family`` to one, whose rows decode to the same bits.

        Args:
            blocks: of each its data, parameters and number of rows, at least one.
            places: for each block its rows' positions in the new one, ``(n,)`` int64, sorted.
            dim: columns of a row.

        Returns:
            The new block's data, 1-D uint8, and its parameters.

        Raises:
            ValueError: data or parameters do not belong to such blocks.
        """
        data = join_rows([(data, rows) for data, _, rows in blocks], places)
        return data, blocks[0][1]

    def scatter(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        positions: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> bool:
        """Decode some rows of a block, each straight into its own row of ``out``.

        Args:
            data: 1-D uint8 on the CPU, as ``encode`` returned it.
            parameters: the block's.
            rows: number of rows of the block.
            positions: ``(n,)`` int64 on the CPU: which rows.
            ids: ``(n,)`` int64 on the CPU: the rows of ``out`` that they go to.
            out: ``(m, dim)``.

        Returns:
            False (the default) if the codec cannot write to such memory; nothing is changed then,
            and callers decode into memory of their own.

        Raises:
            ValueError: data or parameters do not belong to such a block.
        """
        return False

    def needs_base(self, parameters: Parameters) -> bool:
        """Tell whether a block with these parameters holds rows that are differences to what the
        checkpoint before restores; never, by default.
        """
        return False

    def adopt(self, settled: Codec) -> Codec:
        """Return the codec to encode with, given the one that ``settle`` returned for this one."""
        return settled

    def survey(self, sample: Sample) -> Survey | None:
        """Collect the facts that ``settle`` needs of a shard's rows that are to be written.

        Called once per shard if ``surveys`` is True, in any thread.

        Args:
            sample: copies some rows of the shard; on any device.

        Returns:
            None where the shard has nothing to count: without any survey, ``settle`` is not called
            and the codec encodes as it is.
        """
        return None

    def settle(self, survey: Survey) -> Codec:
        """Return the codec that all ranks encode with, given the merged survey of all ranks' rows.

        Called on rank 0 only; the result is pickled to all ranks. Its ``spec`` is the one that
        chunks hold.
        """
        return self

    def __repr__(self) -> str:
        options = (f"{k}={v!r}" for k, v in self.spec().items() if k not in _IN_EVERY_SPEC)
        return f"{type(self).__name__}({', '.join(options)})"


class Method(IntEnum):
    """The ways to find a row's scale and bias (Check-N-Run, section 4.2)."""

    ASYMMETRIC = 0
    """From the row's minimum to its maximum, as FBGEMM does."""
    SYMMETRIC = 1
    """From minus to plus its largest magnitude."""
    GREEDY = 2
    """The paper's search: cuts the range at either end, a bin at a time."""
    ADAPTIVE = 3
    """The search of this package: fits scale and bias to the codes, from several ranges."""


class Refusal(IntEnum):
    """The reason why a row was not encoded."""

    NONE = 0
    NOT_FINITE = 1
    TOO_LARGE = 2
    TOO_SMALL = 3


def output(size: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return ``size`` bytes of ``out``, or new ones where ``out`` is too small or None."""
    if out is not None and out.numel() >= size:
        return out.view(-1)[:size]
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def is_aligned(data: torch.Tensor, size: int) -> bool:
    """Tell whether uint8 memory can be viewed as values of ``size`` bytes each."""
    return data.data_ptr() % size == 0 and data.storage_offset() % size == 0


def require_size(data: torch.Tensor, size: int, what: str) -> None:
    """Refuse data of a length other than ``size`` bytes.

    Raises:
        ValueError: names the expected and the actual length.
    """
    if data.numel() != size:
        raise ValueError(f"{what} take {size} bytes, not {data.numel()}")


def select_rows(
    data: torch.Tensor, rows: int, row_bytes: int, positions: torch.Tensor
) -> torch.Tensor:
    """Return the bytes of the rows at ``positions``, where every row has ``row_bytes`` bytes.

    Raises:
        ValueError: data hold another number of bytes.
    """
    require_size(data, rows * row_bytes, f"{rows} rows of {row_bytes} bytes")
    return data.view(rows, row_bytes).index_select(0, positions).view(-1)


def join_rows(
    blocks: Sequence[tuple[torch.Tensor, int]], places: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the rows of several blocks, each at its place; rows of all blocks are of one size.

    Args:
        blocks: of each its bytes, 1-D uint8, and its number of rows, at least one.
        places: for each block its rows' positions, ``(n,)`` int64, sorted; together all positions.

    Raises:
        ValueError: blocks hold other numbers of bytes.
    """
    size = blocks[0][0].numel() // blocks[0][1]
    total = sum(rows for _, rows in blocks)
    joined = torch.empty((total, size), dtype=torch.uint8, device="cpu")
    for (data, rows), place in zip(blocks, places, strict=True):
        require_size(data, rows * size, f"{rows} rows of {size} bytes")
        copy_rows(data, rows, slice(0, rows), joined, place.numpy())
    return joined.view(-1)
