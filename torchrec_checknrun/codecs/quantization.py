"""Choose how rows are stored: the user's choice, and the codec it means for each table.

The width can follow from the restores that a job expects: each restore from quantized rows disturbs
training once, so fewer restores afford fewer bits (Check-N-Run, section 5.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape, has_magic
from typing import Literal

import torch

from torchrec_checknrun.bitwidth import MOST, width_for
from torchrec_checknrun.codecs import (
    Bf16,
    Codec,
    Delta,
    Exact,
    Fisher,
    Fp16,
    ImportanceWeighted,
    KMeans,
    LcCheckpoint,
    Method,
    Rowwise,
    Settled,
    codec_from_spec,
    key_of,
)
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.kmeans import require_kmeans1d
from torchrec_checknrun.codecs.lc import BITS as LC_BITS
from torchrec_checknrun.codecs.row_state import LOGDELTA, STATE_SCHEMES, is_log
from torchrec_checknrun.errors import UnsupportedFormat

_NARROW = ("fp16", "bf16")
_ROWWISE = tuple(method.name.lower() for method in Method)
_FISHER = ("fisher", "delta")
METHODS = (*_ROWWISE, "kmeans", "importance", *_FISHER, "lc", *_NARROW)
ALONE = {"delta": "fisher", "lc": "adaptive"}
"""The method of rows by themselves in place of each method whose rows build on the last checkpoint,
where they can't.
"""
_STEPS = ("step", "loss", "current_loss", "total_steps", "batch_size", "tail")
"""Fields for ``_FISHER`` alone."""
SMALL_TABLE_ROWS = 1000
"""Tables with fewer rows are stored exactly: together they hardly add to a checkpoint's size, and
each of their rows is looked up often.
"""
OPTIMIZERS = (*STATE_SCHEMES, LOGDELTA)
"""Ways to store optimizer state."""
_Names = dict[str, tuple[int, "Quantization"]]
_SPEC_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class TableEncoding:
    """The way one table's rows become bytes.

    Attributes:
        codec: for the weights.
        optimizer: for optimizer state, one of ``OPTIMIZERS``.
        compress: whether to apply zstd where that makes a chunk smaller.
    """

    codec: Codec
    optimizer: str = "fp32"
    compress: bool = False

    @property
    def state_scheme(self) -> str:
        """Return the scheme, of ``row_state.STATE_SCHEMES``, for state that isn't differences."""
        return "log8" if self.optimizer == LOGDELTA else self.optimizer

    def keeps(self, name: str, state: torch.Tensor) -> bool:
        """Return whether a state is stored as differences to the checkpoint before."""
        return self.optimizer == LOGDELTA and isinstance(self.codec, Delta) and is_log(name, state)

    def settled(self, codecs: Settled) -> TableEncoding:
        """Replace a codec that ranks settle by the one that was settled, if there is one."""
        if not self.codec.surveys:
            return self
        codec = codecs.get(key_of(self.codec))
        return self if codec is None else replace(self, codec=self.codec.adopt(codec))


@dataclass(frozen=True)
class Quantization:
    """The user's choice of how embedding rows are stored. Training itself is not affected.

    Attributes:
        bits: 2, 3, 4 or 8; None: exact, bit for bit, unless ``method`` has a width of its own;
            ``"auto"``: from ``expected_restores``. ``lc``: the paper's x, 2, 3 or 4: the changes
            of ``2**bits - 1`` buckets of a chunk are kept.
        method: how a row is quantized: ``adaptive`` (the best), ``asymmetric`` (FBGEMM's min/max),
            ``symmetric``, ``greedy`` (the paper's search), ``kmeans`` (slow: for reference), ``lc``
            (LC-Checkpoint: changes since the last checkpoint; policy ``Consecutive``). Or, without
            ``bits``: ``importance`` (2, 4 or 8 bits a row, by its weight in the loss),
            ``delta`` (differences to the last checkpoint, a step a row by its weight in the loss;
            policy ``Consecutive``), ``fisher`` (the same steps, each row by itself), ``fp16``,
            ``bf16``.
        expected_restores: how often the job will be restored (``policy.expected_restores``
            estimates it). Once the job was restored more often from quantized rows, the width
            switches to 8 bits (not that of ``delta``, ``fisher`` and ``lc``).
        mean_bits: ``importance``: the budget, bits per value on average over all tables; default 4.
            ``delta``, ``fisher``: of a full checkpoint's trained rows, entropy-coded; default 3 if
            neither ``step`` nor ``loss`` is given.
        offset: ``importance``: instead of a budget, a number added to the bits of every row.
        optimizer: row-wise optimizer state: ``fp32`` (unchanged), ``bf16`` or ``log8``; ``rowlog8``
            is ``log8`` for that and takes a byte for each value of pointwise state, too.
            ``logdelta``, with ``delta``: differences of logarithms to the last checkpoint, of
            tables that aren't stored by ``delta`` (other choices of ``tables``, small ones, those
            beyond ``reference_bytes``) ``log8``.
        compress: whether to apply zstd to all of this where that makes a chunk smaller.
        exact_below_rows: tables with fewer rows are stored exactly.
        tables: other choices for tables whose name matches a pattern (``fnmatch``, on the state
            dict's name without ``.weight``); the first match counts, for small tables, too.
        codec: a codec object, instead of ``bits`` and ``method``: one of your own, for example
            (see ``codecs.register``).
        step: ``delta``, ``fisher``: a row's step is the power of two next to ``step / sqrt(G)``, G
            the sum of its squared gradients in the optimizer's state (row-wise Adagrad's, the
            mean over the row of Adagrad's or of Adam's second moment); ``step`` itself without.
        loss: ``delta``, ``fisher``: the relative change of the loss that a restore may cost, as
            1e-5; with ``current_loss``, ``total_steps`` (done so far) and ``batch_size``.
        tail: ``delta``, ``fisher``: limit steps by the largest learning rate since the last full
            checkpoint, so that rows of rare ids keep their training; more bytes.
        reference_bytes: ``delta``, ``lc``: a rank's memory for what the last checkpoint restores
            (by ``lc`` as much as the tables in fp32); tables beyond are stored by ``fisher``, and
            ``adaptive`` of as many bits. None: half of the free memory, over local ranks.

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
    codec: Codec | None = None
    step: float | None = None
    loss: float | None = None
    current_loss: float | None = None
    total_steps: int | None = None
    batch_size: int | None = None
    tail: bool = False
    reference_bytes: int | None = None

    def __post_init__(self) -> None:
        self._check_width()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {OPTIMIZERS}, not {self.optimizer!r}")
        if not isinstance(self.compress, bool):
            raise ValueError(f"compress must be True or False, not {self.compress!r}")
        if type(self.exact_below_rows) is not int or self.exact_below_rows < 0:
            raise ValueError(
                f"exact_below_rows must be a number of rows such as 1000, not "
                f"{self.exact_below_rows!r}"
            )
        most = self.reference_bytes
        if most is not None and (type(most) is not int or most < 0):
            raise ValueError(
                f"reference_bytes must be a number of bytes such as 8 << 30, or None, not {most!r}"
            )
        self._check_tables()
        self._check_logdelta()
        if self.codec is not None:
            self._check_codec(self.codec)
        if self.method == "kmeans":
            require_kmeans1d()
        self._codec()

    def _check_width(self) -> None:
        """Refuse contradictions among the fields that choose a width."""
        if self.bits not in (None, "auto") and (
            type(self.bits) is not int or self.bits not in WIDTHS
        ):
            raise ValueError(
                f"bits must be None (exact), 'auto' or one of {WIDTHS}, not {self.bits!r}"
            )
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, not {self.method!r}")
        if self.bits is not None and self.method in ("importance", *_FISHER, *_NARROW):
            raise ValueError(f"method {self.method!r} has widths of its own: leave bits out")
        if self.method == "lc" and self.bits not in LC_BITS:
            raise ValueError(
                f"method 'lc' keeps the changes of 2**bits - 1 buckets: give bits, one of {LC_BITS}"
            )
        if self.bits == "auto" and self.expected_restores is None:
            raise ValueError(
                "bits='auto' is chosen from expected_restores: give it (policy.expected_restores "
                "estimates it from nodes, failures and hours)"
            )
        if self.expected_restores is not None:
            width_for(self.expected_restores)
        if self.method not in ("importance", *_FISHER) and self.mean_bits is not None:
            raise ValueError("mean_bits is a parameter of the methods importance, delta and fisher")
        if self.method != "importance" and self.offset is not None:
            raise ValueError("offset is a parameter of method='importance'")
        given = [name for name in _STEPS if getattr(self, name) != getattr(Quantization, name)]
        if given and self.method not in _FISHER:
            raise ValueError(
                f"{given[0]} is a parameter of method='delta' and 'fisher', not of {self.method!r}"
            )

    def _check_tables(self) -> None:
        """Refuse choices for patterns that are not ``Quantization`` objects without patterns."""
        if not isinstance(self.tables, Mapping) or not all(
            isinstance(pattern, str) and isinstance(choice, Quantization)
            for pattern, choice in self.tables.items()
        ):
            raise ValueError(
                'tables must map patterns to choices, as {"*user*": Quantization(bits=4)}, not '
                f"{self.tables!r}"
            )
        if any(choice.tables for choice in self.tables.values()):
            raise ValueError("the choice for a pattern can't have patterns of its own")

    def _check_logdelta(self) -> None:
        """Refuse differences of optimizer state where no rows are differences."""
        if self.optimizer == LOGDELTA and not any(
            choice.method == "delta" and choice.optimizer == LOGDELTA
            for choice in (self, *self.tables.values())
        ):
            raise ValueError(
                "optimizer='logdelta' stores differences to what method='delta' keeps in memory, "
                f"and method is {self.method!r}: give optimizer='log8', a byte a row"
            )

    def _check_codec(self, codec: object) -> None:
        """Refuse a codec whose chunks no restore could read."""
        for name in ("bits", "method", "mean_bits", "offset", *_STEPS):
            if getattr(self, name) != getattr(Quantization, name):
                raise ValueError(f"a codec has a width of its own: leave {name} out")
        if not isinstance(codec, Codec):
            raise ValueError(
                "codec must be an object of a class that inherits from "
                f"torchrec_checknrun.codecs.Codec, not {codec!r}"
            )
        if codec.chained:
            raise ValueError(
                f"{codec!r} builds on what the last checkpoint restores, which Checkpointer keeps: "
                "choose it by method='delta' or 'lc'"
            )
        spec = codec.spec()
        if any(type(value) not in _SPEC_TYPES for value in spec.values()):
            raise ValueError(
                f"spec() of {codec!r} may hold str, int, float, bool and None only: {spec}"
            )
        try:
            known = codec_from_spec(spec)
        except UnsupportedFormat as error:
            raise ValueError(
                f"{codec!r} could not be read again ({error}): register its class with "
                "torchrec_checknrun.codecs.register"
            ) from error
        if type(known) is not type(codec):
            raise ValueError(
                f"{codec!r} would be read as {known!r}: give its class a name of its own and "
                "register it with torchrec_checknrun.codecs.register"
            )

    def resolved(self, lossy_restores: int) -> Quantization:
        """Replace ``auto`` by a width, and any narrow width by 8 bits after too many restores.

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
                codec=None,
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

    def without_tables(self, tables: Collection[str]) -> list[str]:
        """Return the patterns that match none of a model's tables."""
        return [p for p in self.tables if not any(fnmatchcase(table, p) for table in tables)]

    def for_table(self, table: str, rows: int) -> TableEncoding:
        """Return the encoding of a table, given its name and number of rows."""
        choice = self._choice(table)
        if choice is not None:
            return choice._encoding
        return self._exactly if rows < self.exact_below_rows else self._encoding

    @property
    def codecs(self) -> list[Codec]:
        """Return the codecs in use, of those tables that are not stored exactly for being small."""
        return [choice._encoding.codec for choice in (self, *self.tables.values())]

    @property
    def link_method(self) -> str | None:
        """Return the method by which any tables build on the last checkpoint; None if none do."""
        return next((q.method for q in (self, *self.tables.values()) if q.method in ALONE), None)

    def without_links(self, tables: Iterable[str]) -> Quantization:
        """Return the choice with each row by itself for some tables that have links; see ALONE."""
        alone = {}
        for table in tables:
            choice = self._choice(table) or self
            scheme = choice._encoding.state_scheme
            method = ALONE[choice.method]
            alone[escape(table)] = replace(choice, method=method, optimizer=scheme, tables={})
        return replace(self, tables={**alone, **self.tables})

    def widths(self, tables: Mapping[str, int]) -> dict[str, int]:
        """Return the bits of a stored value by table, given the tables' numbers of rows."""
        return {name: self.for_table(name, rows).codec.value_bits for name, rows in tables.items()}

    @property
    def width(self) -> int | None:
        """Return the bits of tables without a choice; None if not one number, or ``"auto"``."""
        return self.bits if isinstance(self.bits, int) else None

    @property
    def _is_narrow(self) -> bool:
        if self.method == "lc":  # what a link leaves out, the next one brings
            return False
        if self.codec is not None:
            return self.codec.lossy and self.codec.value_bits < MOST
        return self.method == "importance" or self.width is not None

    def _choice(self, table: str) -> Quantization | None:
        """Return the choice of the first pattern that a table matches."""
        names, patterns = self._patterns
        at, own = names.get(table, (len(self.tables), None))
        found = (q for i, p, q in patterns if i < at and fnmatchcase(table, p))
        return next(found, own)

    @cached_property
    def _patterns(self) -> tuple[_Names, list[tuple[int, str, Quantization]]]:
        """Return the patterns that are mere names, and the others, numbered: ``without_links`` may
        add as many names as a model has tables, each of which would be compared with each.
        """
        numbered = [(i, p, q) for i, (p, q) in enumerate(self.tables.items())]
        names = {p: (i, q) for i, p, q in numbered if not has_magic(p)}
        return names, [each for each in numbered if each[1] not in names]

    @cached_property
    def _encoding(self) -> TableEncoding:
        return TableEncoding(self._codec(), self.optimizer, self.compress)

    @cached_property
    def _exactly(self) -> TableEncoding:
        return replace(self._encoding, codec=Exact())

    def _codec(self) -> Codec:
        if self.codec is not None:
            return self.codec
        if self.method == "importance":
            return ImportanceWeighted(self.offset, self.mean_bits)
        if self.method in _FISHER:
            kind = Delta if self.method == "delta" else Fisher
            return kind(
                step=self.step,
                mean_bits=self.mean_bits,
                loss=self.loss,
                current_loss=self.current_loss,
                total_steps=self.total_steps,
                batch_size=self.batch_size,
                tail=self.tail,
            )
        if self.method == "lc":
            assert isinstance(self.bits, int)
            return LcCheckpoint(self.bits)
        if self.method in _NARROW:
            return Fp16() if self.method == "fp16" else Bf16()
        if self.bits is None:
            return Exact()
        bits = width_for(self.expected_restores or 0) if self.bits == "auto" else self.bits
        return KMeans(bits) if self.method == "kmeans" else Rowwise(bits, self.method)
