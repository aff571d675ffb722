"""Write and read raw Criteo files for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.dlrm_criteo.criteo_tsv import CriteoTsv
from recipes.dlrm_criteo.samples import Samples
from tests.unit.streams import SIZES, join


def write(path: Path, lines: Sequence[bytes], end: bytes = b"\n") -> str:
    path.write_bytes(b"".join(line + end for line in lines))
    return str(path)


def everything(dataset: CriteoTsv) -> Samples:
    return join(list(dataset.read(0, 1, 0, 1)))


def read_all(path: str | Sequence[str], **options: Any) -> Samples:
    return everything(CriteoTsv(SIZES, path, **{"holdout_every": 0, **options}))
