"""How rows are stored: the user's choice, and the codec that it means for each table."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from torchrec_checknrun.codecs import (
    Bf16,
    Codec,
    Exact,
    Fp16,
    ImportanceWeighted,
    KMeans,
    Method,
    Rowwise,
)
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.kmeans import require_kmeans1d
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES

logger = logging.getLogger(__name__)

_NARROW = ("fp16", "bf16")
_ROWWISE = tuple(method.name.lower() for method in Method)
METHODS = (*_ROWWISE, "kmeans", "importance", *_NARROW)
SMALL_TABLE_ROWS = 1000
"""Tables with fewer rows are stored exactly: together they are no part of a checkpoint's size that
would be seen, and each of their rows is looked up often.
"""


@dataclass(frozen=True)
class TableEncoding:
    """How one table's rows become bytes.

    Attributes:
        codec: for the weights.
        optimizer: for row-wise optimizer state, one of ``row_state.STATE_SCHEMES``.
        compress: whether zstd follows where it makes a chunk smaller.
    """

    codec: Codec
    optimizer: str = "fp32"
    compress: bool = False


EXACT = TableEncoding(Exact())


@dataclass(frozen=True)
class Quantization:
    """How embedding rows are stored. Training itself stays as it is.

    Attributes:
        bits: 2, 3, 4 or 8; None: exact, bit for bit, unless ``method`` has a width of its own;
            ``"auto"``: from ``expected_restores``.
        method: how a row is quantized: ``adaptive`` (the best), ``asymmetric`` (FBGEMM's min/max),
            ``symmetric``, ``greedy`` (the paper's search), ``kmeans`` (slow: for reference). Or,
            without ``bits``: ``importance`` (2, 4 or 8 bit a row, by what the loss makes of it),
            ``fp16``, ``bf16``.
        expected_restores: how often the job will be restored (see ``bitwidth.expected_restores``).
            Once it was restored more often from quantized rows, the width is 8 bit.
        mean_bits: ``importance``: the budget, bits per value on average over all tables; 4 if none.
        offset: ``importance``: in place of a budget, what is added to the bits of every row.
        optimizer: row-wise optimizer state: ``fp32`` (as it is), ``bf16`` or ``log8``.
        compress: zstd upon all that, where it makes a chunk smaller.
        exact_below_rows: tables with fewer rows are stored exactly.
        tables: other choices for tables whose name matches a pattern (``fnmatch``, on the state
            dict's name without ``.weight``); the first that matches counts, and it counts for small
            tables, too.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
        ImportError: k-means without its library.
    """

    bits: int | Literal["auto"] | None = None
    method: str = "adaptive"
    expected_restores: float | None = None
    mean_bits: float | None = None
    offset: float | None = None
    optimizer: str = "fp32"
    compress: bool = False
    exact_below_rows: int = SMALL_TABLE_ROWS
    tables: Mapping[str, Quantization] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bits not in (None, "auto") and (
            type(self.bits) is not int or self.bits not in WIDTHS
        ):
            raise ValueError(
                f"bits must be None (exact), 'auto' or one of {WIDTHS}, not {self.bits!r}"
            )
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, not {self.method!r}")
        if self.bits is not None and self.method in ("importance", *_NARROW):
            raise ValueError(f"method {self.method!r} has widths of its own: leave bits out")
        if self.bits == "auto" and self.expected_restores is None:
            raise ValueError(
                "bits='auto' is chosen from expected_restores: give it (bitwidth.expected_restores "
                "estimates it from nodes, failures and hours)"
            )
        if self.expected_restores is not None:
            width_for(self.expected_restores)
        if self.method != "importance" and (self.mean_bits, self.offset) != (None, None):
            raise ValueError("mean_bits and offset are parameters of method='importance'")
        if self.optimizer not in STATE_SCHEMES:
            raise ValueError(f"optimizer must be one of {STATE_SCHEMES}, not {self.optimizer!r}")
        if not isinstance(self.compress, bool):
            raise ValueError(f"compress must be True or False, not {self.compress!r}")
        if type(self.exact_below_rows) is not int or self.exact_below_rows < 0:
            raise ValueError(
                f"exact_below_rows must be a number of rows such as 1000, not "
                f"{self.exact_below_rows!r}"
            )
        if not isinstance(self.tables, Mapping) or not all(
            isinstance(choice, Quantization) for choice in self.tables.values()
        ):
            raise ValueError(
                'tables must map patterns to choices, as {"*user*": Quantization(bits=4)}, not '
                f"{self.tables!r}"
            )
        if any(choice.tables for choice in self.tables.values()):
            raise ValueError("the choice for a pattern can't have patterns of its own")
        if self.method == "kmeans":
            require_kmeans1d()
        self._codec()

    def resolved(self, lossy_restores: int) -> Quantization:
        """With ``auto`` replaced by a width, or by 8 bit after more restores than were expected.

        Args:
            lossy_restores: how often this job was restored from quantized rows.
        """
        expected = self.expected_restores
        resolved = self
        if self.bits == "auto":
            assert expected is not None
            resolved = replace(resolved, bits=width_for(expected))
        if expected is not None and lossy_restores > expected and resolved._is_narrow:
            resolved = replace(
                resolved,
                bits=MOST,
                mean_bits=None,
                offset=None,
                method=self.method if self.method in (*_ROWWISE, "kmeans") else "adaptive",
            )
        overrides = {
            pattern: replace(
                choice,
                expected_restores=expected
                if choice.expected_restores is None
                else choice.expected_restores,
            ).resolved(lossy_restores)
            for pattern, choice in self.tables.items()
        }
        return replace(resolved, tables=overrides)

    def for_table(self, table: str, rows: int) -> TableEncoding:
        """How a table is stored, by its name and its number of rows."""
        for pattern, choice in self.tables.items():
            if fnmatchcase(table, pattern):
                return choice._encoding()
        if rows < self.exact_below_rows:
            return replace(self._encoding(), codec=Exact())
        return self._encoding()

    def widths(self, tables: Mapping[str, int]) -> dict[str, int]:
        """Bits of a stored value by table, of tables' numbers of rows."""
        return {name: self.for_table(name, rows).codec.value_bits for name, rows in tables.items()}

    @property
    def width(self) -> int | None:
        """Bits of tables without a choice of their own, if ``resolved``; None where that is not one
        number.
        """
        return self.bits if isinstance(self.bits, int) else None

    @property
    def _is_narrow(self) -> bool:
        return self.method == "importance" or self.width is not None

    def _encoding(self) -> TableEncoding:
        return TableEncoding(self._codec(), self.optimizer, self.compress)

    def _codec(self) -> Codec:
        if self.method == "importance":
            return ImportanceWeighted(self.offset, self.mean_bits)
        if self.method in _NARROW:
            return Fp16() if self.method == "fp16" else Bf16()
        if self.bits is None:
            return Exact()
        bits = width_for(self.expected_restores or 0) if self.bits == "auto" else self.bits
        return KMeans(bits) if self.method == "kmeans" else Rowwise(bits, self.method)


_WIDTHS = ((1, 2), (3, 3), (20, 4))
"""Up to so many restores, so many bits."""


MOST = 8
"""The width that any number of restores may have."""


def width_for(restores: float) -> int:
    """Bits for a job that expects so many restores.

    Raises:
        ValueError: it is negative or not a number.
    """
    if not (isinstance(restores, (int, float)) and restores >= 0):
        raise ValueError(f"expected restores must be 0 or more, not {restores!r}")
    return next((bits for limit, bits in _WIDTHS if restores <= limit), MOST)


def expected_restores(nodes: int, mtbf_hours: float, job_hours: float) -> float:
    """How often a job will fail, and so be restored, if nodes fail independently of each other.

    Args:
        nodes: how many the job runs on; it fails when one of them does.
        mtbf_hours: mean time between failures of one node.
        job_hours: how long the job trains.

    Raises:
        ValueError: an argument is not positive.
    """
    if not (nodes > 0 and mtbf_hours > 0 and job_hours > 0):
        raise ValueError(
            f"nodes {nodes}, mtbf_hours {mtbf_hours} and job_hours {job_hours} must be positive"
        )
    return nodes * job_hours / mtbf_hours
