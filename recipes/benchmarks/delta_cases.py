"""Define the delta codec's calls of the codec benchmark, and the entropy to compare bytes with.

One thread encodes and decodes, chunk by chunk: links of differences as they were measured on the
synthetic job (a step of its own for each row, most rows of one to four bits a value), and bases.
The entropy is what an ideal coder takes that knows how often each value occurs: the values of each
class of rows, the rows' symbols, and their extra bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from recipes.benchmarks.codec_cases import OURS, Case
from torchrec_checknrun.delta import kernel, log_levels
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.layout import VERBATIM, classes_of, stands_alone
from torchrec_checknrun.delta.link import encode_upon
from torchrec_checknrun.delta.references import encode_state_upon
from torchrec_checknrun.delta.rows import apply, encode, values_of
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.shards import Rectangle

CHUNK_ROWS = (4096, 65536)
SPREADS = {"link": -1.2, "wide link": 0.6}
"""By name, the mean of log2(spread / step) of a row's differences."""


BASE_STEPS = 9
"""Powers of two by which steps of bases are larger, so that values take 2 to 4 bits."""


BYTE_SIZE = 2.0**-6
"""The step size of values whose codes mostly fit a byte."""


def link_rows(
    n: int, dim: int, spread: float, size: float = 1.0
) -> tuple[torch.Tensor, np.ndarray, Grid]:
    """Draw rows, their wanted exponents, and predecessors; a tenth of the steps has shrunk.

    Args:
        size: of the values: the smaller, the fewer bits have the predecessors' codes.
    """
    rng = np.random.default_rng(1)
    exponents = rng.integers(-12, -6, n).astype(np.int16)
    earlier = (exponents + (rng.random(n) < 0.1)).astype(np.int16)
    start = torch.from_numpy(rng.standard_normal((n, dim), dtype=np.float32)) * size
    before = encode(start, earlier)[1]
    step = np.exp2(exponents + rng.normal(spread, 1.3, n)).astype(np.float32)[:, None]
    moved = rng.standard_normal((n, dim), dtype=np.float32) * step
    weight = np.ldexp(before.codes.astype(np.float32), before.exponent[:, None]) + moved
    return torch.from_numpy(weight.astype(np.float32)), exponents, before


def entropy_bytes(before: Grid | None, after: Grid) -> float:
    """Return the entropy of what a payload holds, in bytes."""
    rows = len(after)
    data, sizes = kernel.encode_rows(None, None, before, after)
    symbols, extra = data[:rows], data[rows : rows + sizes[1]]
    classes, differences = classes_of(symbols), after.codes.astype(np.int64)
    if before is not None:
        builds = ~stands_alone(symbols)
        shift = np.where(builds, before.exponent - after.exponent, 0).astype(np.int64)[:, None]
        differences -= np.where(builds[:, None], before.codes.astype(np.int64) << shift, 0)
    found = _entropy(symbols) + _entropy(extra)
    return found + sum(_entropy(differences[classes == each]) for each in range(1, VERBATIM))


def delta_cases(rows_bytes: int, dim: int) -> Iterator[Case]:
    """Yield encoding and decoding of links and bases, in small and large chunks, on one thread."""
    n = rows_bytes // (4 * dim)
    for name, spread in SPREADS.items():
        weight, wanted, before = link_rows(n, dim, spread)
        for chunk in CHUNK_ROWS:
            yield from _cases(f"{name}, {chunk} rows", weight, wanted, before, chunk)
        yield _upon_references(f"{name}, upon references", n, dim, spread)
    yield from _log_state_cases(n, dim)
    coarse = (wanted + BASE_STEPS).astype(np.int16)
    yield from _cases(f"base, {CHUNK_ROWS[-1]} rows", weight, coarse, None, CHUNK_ROWS[-1])
    copy = torch.zeros(n, dim)
    for part in ("encode delta", "decode delta"):
        call = partial(_on_one_thread, partial(copy.copy_, weight))
        yield Case(part, "memcpy", "", None, weight.nbytes, call)


def _cases(
    method: str, weight: torch.Tensor, wanted: np.ndarray, before: Grid | None, chunk: int
) -> Iterator[Case]:
    n, dim = weight.shape
    spans = [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    bases = [before and _part(before, span) for span in spans]
    payloads, entropy = [], 0.0
    for span, base in zip(spans, bases, strict=True):
        payload, after = encode(weight[span], wanted[span], base)
        payloads.append(payload)
        entropy += entropy_bytes(base, after)
    size = sum(payload.numel() for payload in payloads)

    def encode_all() -> None:
        for span, base in zip(spans, bases, strict=True):
            encode(weight[span], wanted[span], base)

    def decode_all() -> None:
        for payload, span, base in zip(payloads, spans, bases, strict=True):
            apply(payload, span.stop - span.start, dim, base)

    calls: dict[str, Callable[[], None]] = {"encode delta": encode_all, "decode delta": decode_all}
    for part, call in calls.items():
        yield Case(
            part,
            OURS,
            method,
            None,
            weight.nbytes,
            partial(_on_one_thread, call),
            size / n,
            over_entropy=size / entropy,
        )


def _upon_references(method: str, n: int, dim: int, spread: float) -> Case:
    """Encode a link as a save does: upon references, which are replaced, recorded and digested.

    Most rows' codes fit a byte. The rows go to and fro, so that each call has the same differences.
    """
    weight, wanted, before = link_rows(n, dim, spread, BYTE_SIZE)
    references = GridReferences("t", Rectangle(0, n, 0, dim))
    references.scatter(np.arange(n), before)
    spans = [slice(at, min(at + CHUNK_ROWS[-1], n)) for at in range(0, n, CHUNK_ROWS[-1])]
    ids, states = torch.arange(n), [weight, values_of(before, torch.float32)]

    def encode_all() -> None:
        changes = Transaction([references], base=False)
        for span in spans:
            encode = partial(encode_upon, weight=states[0][span], wanted=wanted[span])
            changes.encode(references, ids[span], encode)
        changes.keep()
        states.reverse()

    return Case(
        "encode delta", OURS, method, None, weight.nbytes, partial(_on_one_thread, encode_all)
    )


def _log_state_cases(n: int, dim: int) -> Iterator[Case]:
    """Encode and decode the row-wise state of a link's rows upon references, by ``logdelta``; GB/s
    are of the rows that the state belongs to.

    Sums have grown by up to a third, to and fro, so that each call has such differences.
    """
    generator = torch.Generator().manual_seed(dim)
    sums = torch.rand(n, generator=generator).mul_(20).sub_(15).exp2_()
    states = [sums * (1 + torch.rand(n, generator=generator) / 3), sums]
    references = GridReferences("t", Rectangle(0, n, 0, dim), ["momentum1"])
    held, ids = references.states["momentum1"], torch.arange(n)
    spans = [slice(at, min(at + CHUNK_ROWS[-1], n)) for at in range(0, n, CHUNK_ROWS[-1])]
    codes = [log_levels.codes_of(state) for state in states]
    payloads = [log_levels.encode(codes[0][span], codes[1][span]) for span in spans]

    def encode_all() -> None:
        changes = Transaction([references], base=False)
        for span in spans:
            encode = partial(encode_state_upon, name="momentum1", state=states[0][span])
            changes.encode(references, ids[span], encode)
        changes.keep()
        states.reverse()

    def decode_all() -> None:
        for span, payload in zip(spans, payloads, strict=True):
            positions, before = np.arange(span.start, span.stop), codes[1][span]
            held.scatter(positions, log_levels.decode(payload, len(before), before), before)
            log_levels.values_of(held.gather(positions))

    encode_all()
    size = sum(map(len, payloads)) / n
    calls: dict[str, Callable[[], None]] = {"encode delta": encode_all, "decode delta": decode_all}
    for part, call in calls.items():
        act = partial(_on_one_thread, call)
        yield Case(part, OURS, "state by logdelta", None, 4 * dim * n, act, size)


def _part(rows: Grid, span: slice) -> Grid:
    return Grid(rows.kind[span], rows.exponent[span], rows.codes[span])


def _on_one_thread(call: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
    finally:
        torch.set_num_threads(before)


def _entropy(values: np.ndarray) -> float:
    """Return the entropy of values, in bytes."""
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * np.log2(counts.sum() / counts)).sum() / 8)
