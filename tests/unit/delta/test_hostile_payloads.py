"""Change payloads anywhere: every kernel refuses them with ValueError, or finds the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta.draw import (
    DIMS,
    KERNELS,
    SEEDS,
    drawn_predecessors,
    drawn_rows,
    drawn_steps,
    has_links,
    same,
    using,
)
from tests.unit.fuzz import bounded_memory, change_bytes
from torchrec_checknrun.delta import payload as payloads
from torchrec_checknrun.delta.layout import ALONE, FARTHER, PLANES, VERBATIM, stream_sizes
from torchrec_checknrun.delta.rows import MOST_CODE, Grid, Kind, apply, encode


def tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def outcome(data: torch.Tensor, rows: int, dim: int, before: Grid | None) -> Grid | None:
    """Decode with every kernel; return what all of them find, or None if all of them refuse."""
    found: list[Grid | None] = []
    for name in KERNELS:
        with using(name):
            try:
                found.append(apply(data, rows, dim, before))
            except ValueError:
                found.append(None)
    refused = [each is None for each in found]
    assert len(set(refused)) == 1, dict(zip(KERNELS, refused, strict=True))
    for each in found:
        assert each is None or (found[0] is not None and same(each, found[0]))
    return found[0]


def assert_sound(rows: Grid) -> None:
    on_grid = rows.kind == Kind.GRID
    assert (on_grid | (rows.kind == Kind.VERBATIM)).all()
    assert (np.abs(rows.codes[on_grid].astype(np.int64)) <= MOST_CODE).all()
    assert ((rows.exponent >= -149) & (rows.exponent <= 104)).all()


@st.composite
def changed(draw: st.DrawFn) -> tuple[bytearray, int, int, Grid | None]:
    """Draw a payload with one to three changes; its rows, columns and predecessors."""
    rng, n, dim = np.random.default_rng(draw(SEEDS)), draw(st.integers(1, 40)), draw(DIMS)
    weight = drawn_rows(rng, n, dim, torch.float32)
    before = drawn_predecessors(rng, weight, torch.float32)
    data = bytearray(encode(weight, drawn_steps(rng, n), before)[0].numpy().tobytes())
    for _ in range(draw(st.integers(1, 3))):
        change_bytes(draw, data)
    return data, n, dim, before


@settings(max_examples=examples(600), deadline=None)
@given(changed())
def test_changed_payloads(case: tuple[bytearray, int, int, Grid | None]) -> None:
    data, n, dim, before = case
    with bounded_memory():
        found = outcome(tensor(data), n, dim, before)
    if found is not None:
        assert_sound(found)


@settings(max_examples=examples(300), deadline=None)
@given(SEEDS, st.integers(1, 30), st.integers(1, 40))
def test_any_streams(seed: int, n: int, dim: int) -> None:
    """Forge the streams themselves, in sound frames: any symbols, extra bytes and planes."""
    rng = np.random.default_rng(seed)
    before = drawn_predecessors(rng, drawn_rows(rng, n, dim, torch.float32), torch.float32)
    known = [c * 8 + d for c in range(VERBATIM) for d in range(8)] + [VERBATIM * 8 + ALONE]
    known += [FARTHER + c for c in range(VERBATIM)]
    symbols = rng.choice(np.array(known, np.uint8), n)
    if rng.random() < 0.2:
        symbols[rng.integers(0, n)] = rng.integers(0, 256)
    if rng.random() < 0.5:
        symbols &= 0x3F  # small classes, whose rows may be sound
    try:
        sizes = stream_sizes(symbols, dim)
    except ValueError:
        sizes = [n, 0]
    rest = rng.integers(0, 256, sum(sizes[1:]), dtype=np.uint8)
    found = outcome(payloads.join(np.concatenate([symbols, rest]), sizes), n, dim, before)
    if found is not None:
        assert_sound(found)


@pytest.fixture
def sound() -> tuple[torch.Tensor, int, int]:
    rng = np.random.default_rng(8)
    weight = torch.from_numpy(rng.standard_normal((200, 24)).astype(np.float32))
    return encode(weight, rng.integers(-9, -2, 200).astype(np.int16))[0], 200, 24


def test_cut_and_longer_payloads(sound: tuple[torch.Tensor, int, int]) -> None:
    data, rows, dim = sound
    assert outcome(data, rows, dim, None) is not None
    for cut in range(data.numel()):
        with pytest.raises(ValueError, match=r"."):
            apply(data[:cut], rows, dim)
    longer = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    assert outcome(longer, rows, dim, None) is None


@pytest.mark.parametrize(("rows", "dim"), [(199, 24), (201, 24), (200, 23), (0, 24), (200, 1)])
def test_other_shapes(sound: tuple[torch.Tensor, int, int], rows: int, dim: int) -> None:
    assert outcome(sound[0], rows, dim, None) is None


@pytest.mark.parametrize(
    ("rows", "dim"), [(2**40, 16), (2**62, 1), (200, 2**31), (200, 2**62), (200, 0), (200, -1)]
)
def test_huge_shapes(sound: tuple[torch.Tensor, int, int], rows: int, dim: int) -> None:
    with bounded_memory():
        assert outcome(sound[0], rows, dim, None) is None


def leb128(value: int) -> bytes:
    octets = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([octet | 0x80 for octet in octets[:-1]] + octets[-1:])


def frame(content: bytes, size: int | None = None, window: int | None = None) -> bytes:
    """Compress; if told, state another size in the header, or a wider window."""
    if size is not None:
        made = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(content)
        # Magic number; a single segment whose size takes 8 bytes; then the blocks as they are.
        return made[:4] + b"\xe0" + size.to_bytes(8, "little") + made[6:]
    if window is not None:
        made = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(content)
        header = b"\xc0" + bytes([window]) + len(content).to_bytes(8, "little")
        return made[:4] + header + made[6:]
    return zstandard.ZstdCompressor(level=1).compress(content)


ZERO_ROWS = bytes([ALONE]) * 5000
"""Symbols of rows of zeros that stand alone."""


def forged(symbols: bytes, rest: bytes = b"", lengths: bytes | None = None) -> torch.Tensor:
    lengths = leb128(len(symbols)) if lengths is None else lengths
    return tensor(bytes([payloads.VERSION]) + lengths + symbols + rest)


def test_hostile_frames() -> None:
    good = frame(bytes([149]) * 5000)
    rest = leb128(len(good)) + good
    assert outcome(forged(frame(ZERO_ROWS), rest), 5000, 3, None) is not None
    skippable = b"\x50\x2a\x4d\x18" + (5000).to_bytes(4, "little") + b"\0" * 100
    attacks = {
        "another size stated": frame(ZERO_ROWS, size=4999),
        "a huge size stated": frame(ZERO_ROWS, size=2**50),
        "more content than stated": frame(ZERO_ROWS + b"\x07", size=5000),
        "less content than stated": frame(ZERO_ROWS[:-1], size=5000),
        "a window of 128 MiB": frame(ZERO_ROWS, window=17 << 3),
        "a window of terabytes": frame(ZERO_ROWS, window=31 << 3),
        "two frames": frame(ZERO_ROWS[:2500]) * 2,
        "a frame behind": frame(ZERO_ROWS) + frame(b"x"),
        "a frame cut": frame(ZERO_ROWS)[:-1],
        "a skippable frame": skippable,
        "a frame without size": zstandard.ZstdCompressor(write_content_size=False).compress(
            ZERO_ROWS
        ),
        "no frame": b"\0" * 40,
        "nothing": b"",
    }
    for what, symbols in attacks.items():
        with bounded_memory():
            assert outcome(forged(symbols, rest), 5000, 3, None) is None, what
            assert (
                outcome(forged(frame(ZERO_ROWS), leb128(len(symbols)) + symbols), 5000, 3, None)
                is None
            ), what


def test_frames_that_state_what_so_few_bytes_cannot_hold() -> None:
    rows = 2**36
    with bounded_memory():
        assert outcome(forged(frame(ZERO_ROWS, size=rows)), rows, 16, None) is None


@pytest.mark.parametrize("lengths", [b"", b"\x80", b"\xff" * 9, b"\xff" * 8 + b"\x7f", b"\x90\x4e"])
def test_hostile_lengths(lengths: bytes) -> None:
    assert outcome(forged(frame(ZERO_ROWS), lengths=lengths), 5000, 3, None) is None


def test_another_version() -> None:
    assert outcome(tensor(b""), 1, 1, None) is None
    assert outcome(tensor(b"\x02\x01\x07\x01\x95"), 1, 1, None) is None
    assert outcome(tensor(b"\x01\x01\x07\x01\x95"), 1, 1, None) is not None


@pytest.mark.parametrize("symbol", [*range(208, 215), *range(242, 256)])
def test_unknown_symbols(symbol: int) -> None:
    assert outcome(tensor(bytes([1, 1, symbol])), 1, 1, None) is None
    for name in KERNELS:
        with using(name), pytest.raises(ValueError, match="symbol"):
            has_links(tensor(bytes([1, 1, symbol])), 1, 1)


@pytest.mark.parametrize("extra", [254, 255])
def test_exponents_beyond_fp32(extra: int) -> None:
    assert outcome(tensor(bytes([1, 1, ALONE, 1, 253])), 1, 1, None) is not None
    assert outcome(tensor(bytes([1, 1, ALONE, 1, extra])), 1, 1, None) is None


def one(kind: int, exponent: int, code: int) -> Grid:
    return Grid(
        np.array([kind], np.uint8), np.array([exponent], np.int16), np.array([[code]], "i4")
    )


@pytest.mark.parametrize(
    ("before", "payload", "code"),
    [
        (one(1, -3, 5), [1, 1, 2], 20),  # two steps finer
        (one(1, -3, 5), [1, 1, 8, 1, 2], 6),  # by one more
        (one(1, -3, 5), [1, 1, FARTHER, 1, 9], 5 << 9),
        (None, [1, 1, 2], None),
        (one(0, 0, 0), [1, 1, 2], None),
        (one(2, 0, 5), [1, 1, 2], None),
        (one(1, -149, 5), [1, 1, 0], 5),
        (one(1, -149, 5), [1, 1, 1], None),  # finer than fp32
        (one(1, 104, 0), [1, 1, FARTHER, 1, 253], 0),
        (one(1, 104, 0), [1, 1, FARTHER, 1, 254], None),
        (one(1, 0, MOST_CODE), [1, 1, 0], MOST_CODE),
        (one(1, 0, MOST_CODE), [1, 1, 8, 1, 2], None),  # a code of 25 bits
        (one(1, 0, MOST_CODE), [1, 1, 8, 1, 1], MOST_CODE - 1),
        (one(1, 0, -MOST_CODE), [1, 1, 8, 1, 1], None),
        (one(1, 0, 1 << 23), [1, 1, 1], None),
        (one(1, 0, 1), [1, 1, FARTHER, 1, 24], None),
        (one(1, 0, 1), [1, 1, FARTHER, 1, 23], 1 << 23),
        (one(1, 50, 1), [1, 1, FARTHER, 1, 64], None),  # a shift by the width of a word
        (one(1, 50, 1), [1, 1, FARTHER, 1, 32], None),
    ],
)
def test_sums_out_of_range(before: Grid | None, payload: list[int], code: int | None) -> None:
    found = outcome(tensor(bytes(payload)), 1, 1, before)
    assert (None if found is None else found.codes[0, 0]) == code


@pytest.mark.parametrize("each", [24, 25])
def test_the_largest_classes(each: int) -> None:
    """A row that stands alone has 24 bits at most; a difference may have one more."""
    planes = len(PLANES[each])
    lengths, content = [1] * (1 + planes), [149, 255] + [0] * (planes - 1)
    alone = outcome(tensor(bytes([1, 1, each * 8 + ALONE, *lengths, *content])), 1, 1, None)
    assert (alone is None) == (each == 25)
    link = tensor(bytes([1, 1, each * 8, *lengths[1:], *content[1:]]))
    found = outcome(link, 1, 1, one(1, 0, -MOST_CODE))
    assert found is not None
    assert found.codes[0, 0] == -MOST_CODE + (255 << (8 * (planes - 2) + each - 23 - 1))
