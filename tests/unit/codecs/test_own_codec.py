"""Use a codec from outside of the package: few methods, found by name, settled over all ranks."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.entries import decode_rows, header_of
from tests.unit.tracked_model import ROWS, make_model, table
from torchrec_checknrun import Quantization, codecs
from torchrec_checknrun.codecs import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Exact,
    Parameters,
    RowContext,
    Rowwise,
    Sample,
    Survey,
    Surveys,
    add_survey,
    codec_from_spec,
    key_of,
    register,
    settle,
)
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import UnsupportedFormat
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.save.plan import survey
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot.encoded_at_cut import encoded_while_staged
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot
from torchrec_checknrun.tracking import track

STEP = 2.0**-6
STEPS = 2**15 - 1


class Coarse(Codec):
    """A codec to multiples of a step in int16, with the required methods only."""

    name: ClassVar[str] = "test_coarse"
    lossy: ClassVar[bool] = True

    def __init__(self, step: float = STEP) -> None:
        self.step = step

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Coarse:
        step = spec.get("step")
        assert isinstance(step, float)
        return cls(step)

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version, "step": self.step}

    @property
    def value_bits(self) -> int:
        return 16

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        chosen = rows.detach() if ids is None else rows.detach()[ids]
        data = (chosen / self.step).round().to(torch.int16).view(-1).view(torch.uint8)
        return Encoded(data, {}, torch.empty(0, dtype=torch.int64))

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        codes = data.clone().view(torch.int16).view(rows, -1)[start : start + len(out)]
        out.copy_(codes.to(torch.float32) * self.step)


@dataclass
class Largest:
    """A survey of the largest magnitude."""

    most: float

    def merge(self, other: Largest) -> None:
        self.most = max(self.most, other.most)


class Fitted(Coarse):
    """A codec whose step fits the largest value of all tables and ranks."""

    name: ClassVar[str] = "test_fitted"
    surveys: ClassVar[bool] = True

    def survey(self, sample: Sample) -> Largest | None:
        rows = sample(1 << 20)
        return Largest(float(rows.weight.abs().max())) if rows.count else None

    def settle(self, survey: Survey) -> Fitted:
        assert isinstance(survey, Largest)
        return Fitted(survey.most / STEPS)


@pytest.fixture(autouse=True)
def own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    register(Coarse)
    register(Fitted)


def shard(rows: int = 50, dim: int = 6, scale: float = 1.0) -> LocalShard:
    generator = torch.Generator().manual_seed(rows)
    return LocalShard(
        f"t{rows}",
        TableShape(rows, dim),
        Rectangle(0, rows, 0, dim),
        torch.randn(rows, dim, generator=generator) * scale,
        {"momentum1": torch.rand(rows, generator=generator)},
    )


def test_a_chunk_is_read_by_a_codec_that_only_has_what_every_codec_must_have() -> None:
    local, choice = shard(), Quantization(codec=Coarse(), exact_below_rows=0)
    encoding = choice.for_table(local.table, local.shape.rows)
    assert choice.widths({local.table: 50}) == {local.table: 16}
    chunk = encode_rows(local.block(torch.arange(50)), encoding)
    header = header_of(chunk.entry)
    assert isinstance(header.codec, Coarse)
    assert header.codec.spec() == Coarse().spec()
    rows = decode_rows(chunk.entry, b"".join(bytes(piece) for piece in chunk.pieces))
    assert torch.equal(rows.weight, (local.weight / STEP).round() * STEP)


def test_a_table_may_have_it_alone() -> None:
    choice = Quantization(bits=4, tables={"user*": Quantization(codec=Coarse())})
    assert isinstance(choice.for_table("user_7", 10).codec, Coarse)
    assert isinstance(choice.for_table("item", 10_000).codec, Rowwise)


def test_it_is_settled_over_all_ranks() -> None:
    quantization = Quantization(codec=Fitted(1.0), exact_below_rows=0)
    ranks = [[shard(40), shard(41, scale=9.0)], [shard(42, scale=5.0)], []]
    surveys = [survey([ShardSnapshot(s, None) for s in held], quantization) for held in ranks]
    most = max(float(s.weight.abs().max()) for held in ranks for s in held)
    for _ in range(2):  # settling leaves the surveys unchanged
        settled = pickle.loads(pickle.dumps(settle(surveys)))
        assert settled.keys() == {key_of(Fitted(1.0))}
        codec = quantization.for_table("t40", 40).settled(settled).codec
        assert codec.spec() == {"name": "test_fitted", "version": 1, "step": most / STEPS}
    other = quantization.for_table("t40", 40)
    assert other.settled({}) is other
    plain = Quantization(codec=Coarse()).for_table("t40", 4000)
    assert plain.settled(settle(surveys)) is plain


def test_a_survey_of_one_rank_is_merged_shard_by_shard() -> None:
    surveys: Surveys = {}
    for most in (3.0, 7.0, 5.0):
        add_survey(surveys, Fitted(1.0), Largest(most))
    add_survey(surveys, Fitted(2.0), Largest(1.0))
    assert surveys == {key_of(Fitted(1.0)): Largest(7.0), key_of(Fitted(2.0)): Largest(1.0)}


def test_rows_that_ranks_must_settle_first_are_not_encoded_in_the_stall() -> None:
    local = shard()
    for codec, chosen in ((Coarse(), {local.table}), (Fitted(), set())):
        choice = Quantization(codec=codec, exact_below_rows=0)
        assert encoded_while_staged([local], choice, "encode") == chosen


def test_another_process_finds_it_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(__file__).read_text()
    module = source.partition("\n@dataclass")[0].replace("test_coarse", "test_elsewhere")
    (tmp_path / "codec_elsewhere.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = []

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        asked.append((group, name))
        found = EntryPoint(name, "codec_elsewhere:Coarse", group)
        return [found] if name == "test_elsewhere" else []

    monkeypatch.setattr(codecs, "entry_points", entry_points)
    spec: CodecSpec = {"name": "test_elsewhere", "version": 1, "step": 0.5}
    assert codec_from_spec(spec).spec() == spec
    with pytest.raises(UnsupportedFormat, match=r"'nosuch'.*entry point of the group"):
        codec_from_spec({"name": "nosuch"})
    assert asked == [("torchrec_checknrun.codecs", name) for name in ("test_elsewhere", "nosuch")]


@pytest.mark.parametrize("target", ["no_such_module:Coarse", "json:JSONDecoder", "json:nosuch"])
def test_an_entry_point_that_is_broken_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Raise another error than corruption, which would make restores take an older checkpoint."""

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        return [EntryPoint(name, target, group)]

    monkeypatch.setattr(codecs, "entry_points", entry_points)
    with pytest.raises(UnsupportedFormat, match=f"'nosuch' can't be loaded from .*'{target}'"):
        codec_from_spec({"name": "nosuch"})


def test_a_name_belongs_to_one_class() -> None:
    class Exact2(Exact):
        pass

    class Nameless(Coarse):
        name: ClassVar[Any] = None

    with pytest.raises(ValueError, match=r"'exact' belongs to .*plain\.Exact: give .* another"):
        register(Exact2)
    with pytest.raises(ValueError, match="needs a class attribute 'name' of type str"):
        register(Nameless)
    with pytest.raises(ValueError, match="inherit from"):
        register(int)  # type: ignore[type-var]  # is refused
    assert register(Coarse) is Coarse


def test_codecs_that_no_restore_could_read() -> None:
    class Unknown(Coarse):
        name: ClassVar[str] = "test_unknown"

    class Borrowed(Coarse):
        pass

    class Lists(Coarse):
        def spec(self) -> CodecSpec:
            return {**super().spec(), "steps": [1.0]}

    for codec, message in (
        (Unknown(), r"could not be read again .*register its class"),
        (Borrowed(), "would be read as Coarse"),
        (Lists(), "may hold str, int, float, bool and None only"),
        (7, "inherits from"),
    ):
        with pytest.raises(ValueError, match=message):
            Quantization(codec=codec)  # type: ignore[arg-type]  # is refused
    for more in ({"bits": 4}, {"method": "fp16"}):
        with pytest.raises(ValueError, match=f"leave {next(iter(more))} out"):
            Quantization(codec=Coarse(), **more)


def test_too_many_restores_replace_a_narrow_codec_only() -> None:
    class Narrow(Coarse):
        name: ClassVar[str] = "test_narrow"

        @property
        def value_bits(self) -> int:
            return 4

    register(Narrow)
    for codec, bits in ((Narrow(), 8), (Coarse(), 16)):
        choice = Quantization(codec=codec, expected_restores=1, exact_below_rows=0)
        assert choice.resolved(1).for_table("t", 10).codec is codec
        assert choice.resolved(2).for_table("t", 10).codec.value_bits == bits


@pytest.mark.usefixtures("group")
def test_a_saved_model_comes_back(tmp_path: Path) -> None:
    """Save and restore a model with a settled codec."""
    model = make_model()
    tracked = track(model)
    planner = SavePlanner(tracked, quantization=Quantization(codec=Fitted(), exact_below_rows=0))
    dcp.save({}, storage_writer=StorageWriter(tmp_path / "a"), planner=planner)
    fresh = make_model()
    other = track(fresh)
    for shard in other.shards:
        shard.write_rows(range(ROWS), torch.zeros(ROWS, shard.rectangle.cols))
    dcp.load({}, storage_reader=StorageReader(tmp_path / "a"), planner=LoadPlanner(other))
    saved = {name: table(model, name) for name in tracked.tables}
    most = max(float(rows.abs().max()) for rows in saved.values())
    for name, rows in saved.items():
        error = float((table(fresh, name) - rows).abs().max())
        assert 0 < error <= most / STEPS  # one step, the same for every table
    other.close()
    tracked.close()


def test_its_repr_names_its_options() -> None:
    assert repr(Coarse()) == "Coarse(step=0.015625)"
    assert repr(Rowwise(4)) == "Rowwise(bits=4, method='adaptive')"
