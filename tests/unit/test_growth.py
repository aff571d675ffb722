"""Work grows with the number of tables, chunks, files and values, and not with its square.

Passes and calls are counted, at a hundredth of the numbers that real models have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.chains import Part, encode, one_thread
from tests.unit.entries import header_of
from tests.unit.root.test_retention import make
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.manifest import Header, RankFile
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.model.hand_written import WriteWatch
from torchrec_checknrun.model.progress import set_kernel_options
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.recovery.restore_report import _tell
from torchrec_checknrun.restore.chunks import ChainContent
from torchrec_checknrun.restore.fit import Fit, match_tables
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.save.plan import LocalPlan, PlanSummary, make_global_plan
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.serve import copies as serving
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.left_out import LeftOut
from torchrec_checknrun.tools.completeness import gaps
from torchrec_checknrun.tools.fused import fused_rows
from torchrec_checknrun.tools.links import TableLinks
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.values import shown

MANY = 100
NAMES = [f"sparse.embedding_bag_collection.embedding_bags.{'x' * 150}{i}" for i in range(2000)]
A_SCREEN = 8000
"""Characters of a message that somebody may read."""


class Counted(tuple[StoredChunk, ...]):
    """Chunks that count how often somebody walks through them."""

    walks = 0

    def __iter__(self) -> Iterator[StoredChunk]:
        type(self).walks += 1
        return super().__iter__()


@pytest.fixture
def content() -> ChainContent:
    """A full checkpoint with a chunk of each of many tables."""
    (chunk,) = encode(Part((0, 8), list(range(5)), 5), 5, seed=0)
    assert isinstance(chunk.entry, RowsEntry)
    header = header_of(chunk.entry)
    chunks = Counted(
        StoredChunk("id", "rank-00000.bin", number, chunk.entry, _named(header, name))
        for number, name in enumerate(NAMES[:MANY])
    )
    Counted.walks = 0
    head = make(1)
    # Stand-ins: only the attributes that are read, since thousands of them are made.
    head.tables.update({name: SimpleNamespace(rows=5, dim=8) for name in NAMES[:MANY]})  # type: ignore[misc]  # a stand-in
    return ChainContent(Chain((head,)), (chunks,))


def _named(header: Any, table: str) -> Any:
    import dataclasses

    return dataclasses.replace(header, table=table)


def test_chunks_are_sorted_by_table_once(
    content: ChainContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``export``, ``diff``, ``compact`` and ``verify`` ask for one table after the other."""
    root: Any = None
    monkeypatch.setattr("torchrec_checknrun.tools.fused._newest", lambda *_: {})
    for name in NAMES[:MANY]:
        assert TableReader(content, name, ChunkCache(root)).places
        fused_rows(root, content, name, tmp_path)
        TableLinks(root, name, 5).add(content.by_table[0].get("none", ()))
    assert Counted.walks <= 3


def test_chunks_are_sorted_by_file_once() -> None:
    entry = SimpleNamespace(offset=0, length=7)
    chunks: Any = Counted(  # of stand-ins
        SimpleNamespace(file=f"{i}", entry=entry, number=0)  # type: ignore[misc]  # a stand-in
        for i in range(MANY)
    )
    Counted.walks = 0
    manifest: Any = SimpleNamespace(
        id="id",
        tables={},
        files=[RankFile(f"{i}", 9, 7 + (i == 3), 1, "", 1) for i in range(MANY)],
    )
    assert list(gaps(manifest, chunks)) == ["id/3: 1 bytes are of no chunk"]
    assert Counted.walks <= 3


def _mapped() -> set[str]:
    """Return where this process has mapped files, those of other tests among them."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "checknrun-" in line}


def test_rows_that_wait_for_a_pause_lie_in_few_files() -> None:
    """A process may map 65,530 files: at a file for each block, rows of 8 GB were too many."""
    put: list[tuple[np.ndarray, torch.Tensor]] = []
    table = SimpleNamespace(put=lambda ids, rows: put.append((ids.copy(), rows.clone())))
    replica: Any = SimpleNamespace(tables={"t": table}, dense={}, load_again=lambda: None)
    staged = serving._Staged(replica, most=100)
    before = _mapped()
    given = [
        (np.arange(i, 2 * i + 1), torch.full((i + 1, 5), i % 251, dtype=torch.uint8))
        for i in range(700)
    ]
    for ids, rows in given:
        staged.put("t", ids, rows)
    assert 0 < len(_mapped() - before) < 10
    staged.apply()
    assert len(put) == len(given)
    for (ids, rows), (wanted_ids, wanted_rows) in zip(put, given, strict=True):
        assert np.array_equal(ids, wanted_ids)
        assert torch.equal(rows, wanted_rows)
    staged.close()


def test_what_is_urgent_is_not_looked_for_at_each_chunk() -> None:
    looked_at = 0

    def held_in(ranges: list[int]) -> list[int]:
        nonlocal looked_at
        looked_at += len(ranges) // 2
        return [start % 97 for start in ranges[::2]]

    copies = SimpleNamespace(native=SimpleNamespace(held_in=held_in))
    shard = SimpleNamespace(copies=_Hashed(copies))
    rows: Any = CutRows.__new__(CutRows)
    rows._urgent = []
    rows.copies = SimpleNamespace(overflow=SimpleNamespace(nearly_full=True))
    n = 20 * MANY
    left: Any = {f"{i}": SimpleNamespace(shard=shard, start=i, stop=i + 1) for i in range(n)}
    first = rows.most_urgent(left)
    assert left.pop(first).start % 97 == 96
    while left:
        left.pop(rows.most_urgent(left) or next(iter(left)))
    assert looked_at < 50 * n


class _Hashed:
    def __init__(self, of: Any) -> None:
        self.native = of.native


class _Steps(nn.Module):
    """A module that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0


def test_values_that_move_are_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = [_Steps() for _ in range(MANY)]
    model = nn.ModuleList(modules)
    look = LeftOut(model, {})
    for module in modules:
        module.steps += 1
    compared, equals = 0, shown._equals

    def counted(leaf: object, value: object) -> bool:
        nonlocal compared
        compared += 1
        return equals(leaf, value)

    monkeypatch.setattr(shown, "_equals", counted)
    saved = {"other": {f"a{i}": i for i in range(MANY)}, "b": {"0.steps": 1}}
    look.look(saved)
    assert not caplog.messages  # each has a value of its name and content
    assert compared <= 3 * MANY
    look = LeftOut(model, {})
    for module in modules:
        module.steps += 1
    look.look(saved)
    assert "model.0.steps, model.1.steps" in caplog.text


def test_parameters_beside_the_model_are_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of one shape, in a state object of another form than the parameters'."""
    beside = [nn.Parameter(torch.full((3,), float(i))) for i in range(MANY)]
    adam = torch.optim.SGD(beside, lr=0.1)
    compared, shape = 0, np.shape

    def counted(value: Any) -> Any:
        nonlocal compared
        compared += 1
        return shape(value)

    monkeypatch.setattr(np, "shape", counted)
    model = nn.Linear(1, 1)
    shown = {f"{i}": parameter.detach().clone() for i, parameter in enumerate(beside)}
    LeftOut(model, {"adam": adam}).look({"net": shown})
    assert not caplog.messages
    assert 0 < compared <= 3 * MANY
    del shown["7"]
    LeftOut(model, {"adam": adam}).look({"net": shown})
    (line,) = caplog.messages
    assert "parameter 7 of group 0" in line


@pytest.mark.skipif(not has_extension(), reason="the compiled extension was not built")
def test_pages_are_given_back_in_time_that_does_not_grow() -> None:
    """Training waits for the lock under which the background gives pages back."""

    def seconds(n: int) -> float:
        page = 128
        native = torch.classes.checknrun
        memory = native.OverflowMemory(torch.zeros(n * page, dtype=torch.uint8), page)
        weight, states = torch.zeros(n, 20), torch.zeros(n, dtype=torch.uint8)
        kernel = native.KernelRows([weight, states], [0, n, 1, 0, 1], memory)
        ids = torch.arange(n - 1, -1, -1)
        assert kernel.protect_shard(0, ids, 0) == n
        assert memory.free() == 0
        target = torch.zeros(n * 88, dtype=torch.uint8)
        began = time.thread_time()
        kernel.shard(0).stage(torch.arange(n), 0, target, [0, 8 * n])
        taken = time.thread_time() - began
        assert memory.free() == n
        return taken

    few, many = (min(seconds(n) for _ in range(3)) for n in (25_000, 200_000))
    assert many < 30 * few  # a list of pages that is searched: 64 times as much


def test_plans_of_replicas_take_time_in_proportion() -> None:
    """With two-dimensional parallelism half of the ranks leave all of their shards to others."""

    def plan(tables: int) -> float:
        shapes = {f"t{i}": TableShape(10, 4) for i in range(tables)}
        place = Rectangle(0, 10, 0, 4)
        summary = PlanSummary(
            header=Header(),
            tables=shapes,
            shards=[(name, place) for name in shapes],
            fp32_bytes=dict.fromkeys(shapes, 160),
            progress={},
            replicated={},
            per_rank=(),
            averaged={f"{name}{place}": b"" for name in shapes},
        )
        items = tuple(f"{name}{place}#{i}" for name in shapes for i in range(3))
        began = time.thread_time()
        shares, whole = make_global_plan([LocalPlan(items, summary)] * 2, RankDifferences())
        taken = time.thread_time() - began
        assert [len(share.items) for share in shares] == [3 * tables, 0]
        assert whole.fp32_bytes == dict.fromkeys(shapes, 160)
        return taken

    few, many = (min(plan(tables) for _ in range(3)) for tables in (500, 4000))
    assert many < 30 * few  # by comparing all with all: 64 times as much


def _mismatch() -> str:
    tables = dict.fromkeys(NAMES, TableShape(5, 4))
    with pytest.raises(IncompatibleCheckpoint) as raised:
        match_tables({"t": TableShape(5, 4)}, tables, Fit())
    with pytest.raises(IncompatibleCheckpoint) as other:
        match_tables({**tables, "t": TableShape(5, 4)}, tables, Fit())
    return f"{raised.value}\n{other.value}"


def _written() -> str:
    watch: Any = WriteWatch.__new__(WriteWatch)
    watch.kernel = SimpleNamespace(shards=[SimpleNamespace(table=name) for name in NAMES])
    return str(watch.written_outside())


def _options(caplog: pytest.LogCaptureFixture) -> str:
    tbe: Any = SimpleNamespace(optimizer_args=SimpleNamespace(eps=0.0))
    options = {name: {"kernel.eps": float(i)} for i, name in enumerate(NAMES)}
    set_kernel_options(tbe, {}, options)
    return caplog.text


def _skipped(caplog: pytest.LogCaptureFixture) -> str:
    saver: Any = SimpleNamespace(log=lambda text, *of, level: logging.warning(text, *of))
    _tell(saver, "passed_over", [f"table {i}: only in the model" for i in range(2000)])
    assert "passed over: table 0: " in caplog.text
    assert "and 1980 more, in the report's passed_over" in caplog.text
    return caplog.text


@pytest.mark.parametrize("of", [_mismatch, _written, _options, _skipped])
def test_messages_name_the_first_of_thousands_of_tables(
    of: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    text = of(caplog) if of in (_options, _skipped) else of()
    assert 0 < len(text) < A_SCREEN


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield
