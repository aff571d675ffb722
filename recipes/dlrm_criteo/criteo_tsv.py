"""Read Criteo's raw files: Kaggle's train.txt and the Terabyte log's day_0 to day_23, plain or
gzip.

The files are far larger than memory, so they are streamed in blocks. A rank needs few of the lines,
so lines are found by their newlines, and only the wanted ones are parsed, many at a time with
numpy. A line has 40 tab-separated columns: the label (0 or 1), 13 integers and 26 hexadecimal ids;
all but the label may be empty. As in the DLRM reference, a missing or negative integer counts as 0,
then log(x + 1) is taken. Ids are mapped into the tables by modulo, a missing one to 0.
"""

from __future__ import annotations

import glob
import gzip
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT

from recipes.dlrm_criteo.samples import Chunk, ChunkedDataset, Samples

logger = logging.getLogger(__name__)

COLUMNS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT
COLUMN_NAMES = [
    "the label",
    *(f"integer column I{i + 1}" for i in range(INT_FEATURE_COUNT)),
    *(f"category column C{i + 1}" for i in range(CAT_FEATURE_COUNT)),
]
MAX_LINE = 4096  # bytes; Criteo's lines have fewer than 400
BLOCK = 1 << 20
_TAB, _NEWLINE, _MINUS, _ZERO, _ONE = b"\t\n-01"
_MAX_DECIMALS, _MAX_HEX = 18, 16  # limits that fit 64 bits

_HEX = np.full(256, 255, np.uint8)  # byte -> its hexadecimal value, 255 for none
for _digit, _byte in enumerate(b"0123456789abcdef"):
    _HEX[_byte] = _HEX[ord(chr(_byte).upper())] = _digit


class CriteoFormatError(ValueError):
    """A file differs from Criteo's format; the error names the place and the remedy."""


class Parsed(NamedTuple):
    """The columns of some lines, before any transformation."""

    dense: np.ndarray  # int64 (n, 13)
    sparse: np.ndarray  # uint64 (n, 26)
    labels: np.ndarray  # float32 (n,)
    faults: dict[int, str]  # line -> its fault; the line's values are meaningless


def parse_lines(text: bytes) -> Parsed:
    """Parse all lines of `text`, which ends in a newline."""
    data = np.frombuffer(text, np.uint8)
    starts, ends, faults, count = _fields(data)
    # From here on only lines with the right number of columns; `numbers` are their line numbers.
    numbers = np.delete(np.arange(count), np.array(list(faults), np.int64))
    label, dense = slice(0, 1), slice(1, 1 + INT_FEATURE_COUNT)
    sparse = slice(1 + INT_FEATURE_COUNT, COLUMNS)
    labels, labels_ok = _labels(data, starts[:, label], ends[:, label])
    integers, integers_ok = _integers(data, starts[:, dense], ends[:, dense])
    ids, ids_ok = _hexadecimals(data, starts[:, sparse], ends[:, sparse])
    ok = np.concatenate((labels_ok, integers_ok, ids_ok), axis=1)
    for i in np.flatnonzero(~ok.all(axis=1)):
        column = int(np.argmin(ok[i]))
        field = text[starts[i, column] : ends[i, column]]
        faults[int(numbers[i])] = (
            f"{COLUMN_NAMES[column]} is {_show(field)}; expected {_expected(column)}"
        )
    if len(numbers) < count:
        integers, ids, labels = (_spread(a, numbers, count) for a in (integers, ids, labels))
    return Parsed(integers, ids, labels[:, 0], faults)


def _fields(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, str], int]:
    """Find where the fields of lines with 40 columns start and end.

    Other lines are returned as faults; the last value is the number of all lines.
    """
    ends = np.flatnonzero((data == _TAB) | (data == _NEWLINE))
    starts = np.concatenate(([0], ends[:-1] + 1))
    line_ends = np.flatnonzero(data[ends] == _NEWLINE)
    columns = np.diff(line_ends, prepend=-1)
    sizes = np.diff(ends[line_ends], prepend=-1) - 1
    faulty = (columns != COLUMNS) | (sizes > MAX_LINE)
    faults = {int(i): _wrong_line(columns[i], sizes[i]) for i in np.flatnonzero(faulty)}
    if faults:
        whole = np.repeat(~faulty, columns)
        starts, ends = starts[whole], ends[whole]
    return starts.reshape(-1, COLUMNS), ends.reshape(-1, COLUMNS), faults, len(columns)


def _labels(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parse the labels in these fields; also return which are well-formed."""
    byte = data[starts]
    ok = (ends - starts == 1) & ((byte == _ZERO) | (byte == _ONE))
    return (byte == _ONE).astype(np.float32), ok


def _integers(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parse the decimal numbers in these fields, 0 if empty; also return which are well-formed."""
    negative = (ends > starts) & (data[starts] == _MINUS)
    digits = ends - starts - negative
    ok = (digits <= _MAX_DECIMALS) & (digits >= negative)
    values = np.zeros(starts.shape, np.int64)
    for place in range(int(np.where(ok, digits, 0).max(initial=0))):
        used = ok & (place < digits)
        digit = data[np.where(used, ends - 1 - place, ends)] - np.uint8(_ZERO)
        ok &= ~used | (digit <= 9)
        values += np.where(used, digit.astype(np.int64), 0) * 10**place
    return np.where(negative, -values, values), ok


def _hexadecimals(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parse the hexadecimal numbers in these fields, 0 if empty; also return which are valid."""
    digits = ends - starts
    ok = digits <= _MAX_HEX
    values = np.zeros(starts.shape, np.uint64)
    for place in range(int(np.where(ok, digits, 0).max(initial=0))):
        used = ok & (place < digits)
        digit = _HEX[data[np.where(used, ends - 1 - place, ends)]]
        ok &= ~used | (digit <= 15)
        values += np.where(used, digit, 0).astype(np.uint64) << np.uint64(4 * place)
    return values, ok


def _wrong_line(columns: int, size: int) -> str:
    if size == 0:
        return "it is blank"
    if size > MAX_LINE:
        return f"it is longer than {MAX_LINE:,} bytes"
    hint = " (Kaggle's test.txt has no label: it cannot be used)" if columns == COLUMNS - 1 else ""
    return (
        f"it has {columns} tab-separated columns{hint}; expected {COLUMNS}: the label, "
        f"{INT_FEATURE_COUNT} integers, {CAT_FEATURE_COUNT} hexadecimal ids"
    )


def _expected(column: int) -> str:
    if column == 0:
        return "0 or 1"
    if column <= INT_FEATURE_COUNT:
        return f"nothing or an integer of at most {_MAX_DECIMALS} digits"
    return f"nothing or at most {_MAX_HEX} hexadecimal digits"


def _show(field: bytes) -> str:
    return repr(field[:40])[1:] + ("..." if len(field) > 40 else "")


def _spread(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    spread = np.zeros((count, *values.shape[1:]), values.dtype)
    spread[rows] = values
    return spread


class Block(NamedTuple):
    """A run of whole lines of a file, each ended by one newline."""

    path: str
    first_line: int  # counted from 1
    text: bytes


def blocks(path: str) -> Iterator[Block]:
    """Yield a file in blocks of whole lines; CRLF becomes LF, blank lines at the end are dropped.

    A line beyond MAX_LINE is cut to a length that is still recognisably too much, so that a file
    without newlines does not fill the memory.
    """
    line = 1
    rest = b""
    for data in _read(path):
        data = rest + data
        # Hold blank lines back until another line follows.
        content = len(data[: data.rfind(b"\n") + 1].rstrip(b"\r\n"))
        if not content and data.rfind(b"\n") > BLOCK:
            content = data.rfind(b"\n")  # so many blank lines are not just the end of a file
        end = data.find(b"\n", content) + 1 if content else 0
        if end:
            text = data[:end].replace(b"\r\n", b"\n")
            yield Block(path, line, text)
            line += text.count(b"\n")
        rest = data[end:]
        rest = rest[: rest.rfind(b"\n") + 1 + MAX_LINE + 2]
    rest = rest.rstrip(b"\r\n")
    if rest:
        yield Block(path, line, rest.replace(b"\r\n", b"\n") + b"\n")


def _read(path: str) -> Iterator[bytes]:
    with open(path, "rb") as plain:
        compressed = plain.peek(2)[:2] == b"\x1f\x8b"
        stream: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=plain) if compressed else plain
        try:
            while data := stream.read(BLOCK):
                yield data
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CriteoFormatError(
                f"{path}: the gzip file is damaged or cut off ({error}); fetch it again"
            ) from error


@dataclass(frozen=True)
class LazyChunk:
    """Lines that are parsed when taken; the first malformed one of these is an error."""

    block: Block
    newlines: np.ndarray
    num_embeddings: np.ndarray

    @staticmethod
    def of(block: Block, num_embeddings: np.ndarray) -> LazyChunk:
        newlines = np.flatnonzero(np.frombuffer(block.text, np.uint8) == _NEWLINE)
        return LazyChunk(block, newlines, num_embeddings)

    def __len__(self) -> int:
        return len(self.newlines)

    def take(self, rows: np.ndarray) -> Samples:
        ends = self.newlines[rows] + 1
        starts = np.where(rows > 0, self.newlines[rows - 1] + 1, 0)
        text = self.block.text
        parsed = parse_lines(
            b"".join([text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        )
        if parsed.faults:
            row, fault = min(parsed.faults.items())
            raise CriteoFormatError(
                f"{self.block.path}, line {self.block.first_line + int(rows[row])}: {fault}; "
                "correct the file, or leave such lines out with dataset.on_bad_line=skip"
            )
        return _samples(parsed, self.num_embeddings)


@dataclass(frozen=True)
class CheckedChunk:
    """The well-formed lines of a block, already parsed."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples.labels)

    def take(self, rows: np.ndarray) -> Samples:
        return Samples(*(array[rows] for array in self.samples))


def _samples(parsed: Parsed, num_embeddings: np.ndarray) -> Samples:
    return Samples(
        dense=np.log1p(np.maximum(parsed.dense, 0)).astype(np.float32),
        sparse=(parsed.sparse % num_embeddings.astype(np.uint64)).astype(np.int64),
        labels=parsed.labels,
    )


class CriteoTsv(ChunkedDataset):
    """The raw Criteo files in the given order; files of a pattern in natural order (day_2, day_10).

    on_bad_line="raise": a rank parses its own samples only, and a malformed line among them is a
    CriteoFormatError. "skip": malformed lines are left out, logged and counted in `bad_lines`; all
    ranks parse every line to agree on the numbering, which is slower.
    """

    def __init__(
        self,
        num_embeddings_per_feature: Sequence[int],
        path: str | Sequence[str],
        eval_path: str | Sequence[str] | None = None,
        on_bad_line: Literal["raise", "skip"] = "raise",
        holdout_every: int = 10,
        epochs: int = 1,
    ) -> None:
        super().__init__(
            num_embeddings_per_feature, 0 if eval_path is not None else holdout_every, epochs
        )
        if on_bad_line not in ("raise", "skip"):
            raise ValueError(f"dataset.on_bad_line is {on_bad_line!r}; expected 'raise' or 'skip'")
        self.paths = find_files(path, "dataset.path")
        self.eval_paths = None if eval_path is None else find_files(eval_path, "dataset.eval_path")
        self.on_bad_line = on_bad_line
        self._bad_lines: dict[str, int] = {}

    @property
    def bad_lines(self) -> int:
        """Return the number of malformed lines so far; lines that were read again count once."""
        return sum(self._bad_lines.values())

    def chunks(self) -> Iterator[Chunk]:
        return self._chunks(self.paths)

    def eval_chunks(self) -> Iterator[Chunk] | None:
        return None if self.eval_paths is None else self._chunks(self.eval_paths)

    def describe(self) -> str:
        left_out = f", {self.bad_lines} malformed lines left out" if self.bad_lines else ""
        return f"dataset.path ({', '.join(self.paths)}{left_out})"

    def _chunks(self, paths: list[str]) -> Iterator[Chunk]:
        for path in paths:
            if self.on_bad_line == "raise":
                for block in blocks(path):
                    yield LazyChunk.of(block, self.num_embeddings)
            else:
                yield from self._checked_chunks(path)

    def _checked_chunks(self, path: str) -> Iterator[Chunk]:
        bad = 0
        known = self._bad_lines.get(path, 0)
        for block in blocks(path):
            parsed = parse_lines(block.text)
            for row, fault in sorted(parsed.faults.items()):
                bad += 1
                if bad == 1 and not known:
                    number = block.first_line + row
                    logger.warning("%s, line %d is left out: %s", path, number, fault)
            self._bad_lines[path] = max(bad, self._bad_lines.get(path, 0))
            good = np.ones(len(parsed.labels), bool)
            good[list(parsed.faults)] = False
            arrays = (parsed.dense[good], parsed.sparse[good], parsed.labels[good])
            yield CheckedChunk(_samples(Parsed(*arrays, faults={}), self.num_embeddings))
        if bad > known:
            logger.warning("%s: %d malformed lines were left out", path, bad)


def find_files(path: str | Sequence[str], option: str) -> list[str]:
    """List the files that `path` names: a file, a pattern, or a list of such."""
    wanted = [path] if isinstance(path, str) else [str(p) for p in path]
    files = [file for name in wanted for file in _matches(os.path.expanduser(name), option)]
    if not files:
        raise ValueError(f"{option} is empty; expected a file, a list of files or a pattern")
    return files


def _matches(name: str, option: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        raise IsADirectoryError(
            f"{option}: {name} is a directory; name its files, for example {name.rstrip('/')}/day_*"
        )
    found = sorted(filter(os.path.isfile, glob.glob(name)), key=natural_order)
    if not found:
        raise FileNotFoundError(
            f"{option}: there is no file {name!r} and none matches it as a pattern (searched from "
            f"{os.getcwd()}); give Kaggle's train.txt or the Terabyte files, e.g. data/day_*.gz"
        )
    twice = [file for file in found if f"{file}.gz" in found]
    if twice:
        raise ValueError(
            f"{option}: {name!r} matches both {twice[0]} and {twice[0]}.gz, which would be trained "
            "twice; use a pattern that matches one of them"
        )
    return found


def natural_order(name: str) -> list[int | str]:
    """Split a name so that numbers sort by value: day_2 before day_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
