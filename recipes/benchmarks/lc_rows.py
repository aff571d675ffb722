"""Print what LC-Checkpoint takes for rows: bytes, processor time, and memory for references.

    python -m recipes.benchmarks.lc_rows

The rows are those of the delta codec's benchmark: differences of one to four bits at steps of their
own. A save encodes upon references, which it replaces, records and digests; NumPy does all of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from recipes.benchmarks.delta_cases import BYTE_SIZE, SPREADS, link_rows
from torchrec_checknrun.codecs import LcCheckpoint
from torchrec_checknrun.delta.lc import rows as lc_rows
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.rows import values_of
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.shards import Rectangle

T = TypeVar("T")

DIMS = (16, 64, 128)
BITS = (2, 3, 4)
_HEAD = (
    "| x | dim | bytes of a row | encode upon references, MB/s | decode, MB/s "
    "| references, bytes a row |"
)


def line(bits: int, dim: int, rows: int, repeats: int) -> str:
    """Return a line of the table in Markdown: the best of some repeats."""
    weight, _, before = link_rows(rows, dim, SPREADS["link"], BYTE_SIZE)
    known, every, ids = values_of(before, torch.float32), np.arange(rows), torch.arange(rows)
    references, codec = ValueReferences("t", Rectangle(0, rows, 0, dim)), LcCheckpoint(bits)
    act = partial(lc_rows.encode_upon, weight=weight, bits=bits)
    encode, decode, size = [], [], 0
    for _ in range(repeats):
        references.scatter(every, lc_rows.rows_of(known))
        grid, changes = references.gather(every), Transaction([references], base=False)
        seconds, (payload, _) = timed(partial(changes.encode, references, ids, act))
        encode.append(seconds)
        changes.keep()
        size = len(payload)
        apply = partial(codec.apply, payload, {"link": True}, rows, grid, every, dim)
        decode.append(timed(apply)[0])
    speeds = (f"{weight.nbytes / 1e6 / min(taken):.0f}" for taken in (encode, decode))
    cells = [str(bits), str(dim), f"{size / rows:.1f}", *speeds, f"{references.bytes / rows:.0f}"]
    return f"| {' | '.join(cells)} |"


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the processor time of a call, in seconds, and its result."""
    before = time.process_time()
    result = call()
    return time.process_time() - before, result


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=16 << 20, help="of a chunk's rows in fp32")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(_HEAD)
    print("|" + "---:|" * _HEAD.count(" | ") + "---:|")
    for bits in BITS:
        for dim in DIMS:
            print(line(bits, dim, arguments.bytes // (4 * dim), arguments.repeats))


if __name__ == "__main__":
    main()
