"""Return chunks of rows and states unchanged from storage; lossy ones within their error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.entries import decode_rows, decode_stored, fields, header_of
from tests.unit.format.shards import encode, make_shard, stored
from torchrec_checknrun.codecs import Codec, Exact, ImportanceWeighted, RowContext, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedTable
from torchrec_checknrun.format import row_reader
from torchrec_checknrun.format.chunk import state_chunk
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.format.row_reader import StoredRows, as_range
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows
from torchrec_checknrun.values.state import encode_state

pytestmark = pytest.mark.usefixtures("either_kernel")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
STATE_DTYPES = [*DTYPES, torch.int64, torch.int32]
CODECS: list[Codec] = [
    Exact(),
    *(Rowwise(bits, method) for bits in (8, 4, 3, 2) for method in ("asymmetric", "adaptive")),
    ImportanceWeighted(),
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


@st.composite
def shards_and_rows(draw: st.DrawFn) -> tuple[LocalShard, Rows]:
    rows, cols = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    names = draw(st.lists(st.sampled_from(["momentum1", "exp_avg_sq", "sum"]), unique=True))
    shard = make_shard(
        rows,
        cols,
        draw(st.sampled_from([0, 7, 2**33])),
        draw(st.sampled_from([0, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
        states={n: (draw(st.sampled_from(STATE_DTYPES)), draw(st.booleans())) for n in names},
        seed=draw(st.integers(0, 1000)),
    )
    local = draw(st.sets(st.integers(0, rows - 1), min_size=1).map(sorted))
    return shard, shard.gather(torch.tensor(local) + shard.rectangle.row_start)


@settings(max_examples=examples(120), deadline=None)
@given(shards_and_rows(), st.sampled_from(CODECS))
def test_rows_come_back(shard_and_rows: tuple[LocalShard, Rows], codec: Codec) -> None:
    shard, rows = shard_and_rows
    entry, payload = stored(encode(shard, rows, codec))
    decoded = decode_rows(entry, payload)
    assert decoded.ids.dtype == torch.int64
    assert decoded.ids.tolist() == rows.ids.tolist()
    dtype = shard.weight.dtype
    encoded = codec.encode(rows.weight, context=RowContext(rows.optimizer))
    wanted = torch.empty_like(rows.weight)
    codec.decode(encoded.data.view(-1), encoded.parameters, len(wanted), 0, wanted)
    wanted[encoded.exceptions] = rows.weight[encoded.exceptions]
    stored_exactly = entry["weight"]["codec"] == Exact().spec()
    assert same_bits(decoded.weight, rows.weight if stored_exactly else wanted)
    assert list(decoded.optimizer) == list(rows.optimizer)
    for name, state in rows.optimizer.items():
        assert same_bits(decoded.optimizer[name], state)
    header = header_of(entry)
    assert (header.table, header.shape) == (shard.table, shard.shape)
    assert header.rectangle == Rectangle(
        int(rows.ids[0]),
        int(rows.ids[-1]) + 1,
        shard.rectangle.col_start,
        shard.rectangle.col_stop,
    )
    assert header.count == len(rows.ids)
    assert header.dtype == dtype
    assert header.codec.spec() in (codec.spec(), Exact().spec())
    assert header.optimizer == {n: (s.dtype, s.dim() == 1) for n, s in rows.optimizer.items()}


@settings(max_examples=examples(60), deadline=None)
@given(shards_and_rows(), st.sampled_from(CODECS))
def test_the_entry_accounts_for_every_byte(
    shard_and_rows: tuple[LocalShard, Rows], codec: Codec
) -> None:
    chunk = encode(*shard_and_rows, codec)
    entry = fields(chunk)
    parts = [entry["ids"], entry["weight"], *entry["optimizer"]]
    parts += [entry["weight"]["exceptions"]] if "exceptions" in entry["weight"] else []
    assert sum(part["bytes"] for part in parts) == len(chunk.getvalue())
    assert entry["weight"]["value_bits"] in (codec.value_bits, 32)


def test_all_rows_need_no_ids() -> None:
    shard = make_shard(100, 8)
    rows = shard.gather(torch.arange(100))
    chunk = encode(shard, rows, Exact())
    assert len(chunk.getvalue()) == shard.weight.nbytes


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_rows_that_a_codec_would_destroy_are_stored_exactly(bits: int, value: float) -> None:
    shard = make_shard(30, 32, states={"momentum1": (torch.float32, True)})
    shard.weight[3, 5] = value
    shard.optimizer["momentum1"][2] = float("nan")
    rows = shard.gather(torch.arange(1, 29))
    entry, payload = stored(encode(shard, rows, Rowwise(bits)))
    decoded = decode_rows(entry, payload)
    assert same_bits(decoded.weight[2], rows.weight[2])
    assert entry["weight"]["exceptions"]["rows"] == 1
    assert entry["weight"]["value_bits"] == bits
    assert 0 < entry["error"]["max"] < 1
    unharmed = torch.arange(28) != 2
    alone = decode_rows(*stored(encode(shard, shard.gather(rows.ids[unharmed]), Rowwise(bits))))
    assert same_bits(decoded.weight[unharmed], alone.weight)
    assert same_bits(decoded.optimizer["momentum1"], shard.optimizer["momentum1"][1:29])


def test_mostly_rows_that_a_codec_would_destroy_are_a_chunk_stored_exactly() -> None:
    shard = make_shard(6, 8)
    shard.weight[1:5, 0] = float("nan")
    entry, payload = stored(encode(shard, shard.gather(torch.arange(6)), Rowwise(4)))
    assert same_bits(decode_rows(entry, payload).weight, shard.weight)
    assert entry["weight"]["codec"] == Exact().spec()
    assert entry["weight"]["value_bits"] == 32
    assert "error" not in entry


@pytest.mark.parametrize("block_rows", [1, 7, 100])
def test_blocks_are_parts_of_the_whole(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "CONVERTED_BYTES", block_rows * 16 * 4)
    shard = make_shard(40, 16, states={"momentum1": (torch.float32, True)})
    shard.weight[::9] = float("inf")
    shard.optimizer["momentum1"].abs_()
    for codec in CODECS:
        chunk = encode_rows(
            shard.block(torch.arange(40)), TableEncoding(codec, "log8", compress=True)
        )
        entry, payload = stored(chunk)
        whole = decode_rows(entry, payload)
        blocks = []
        for block in StoredRows(header_of(entry), memoryview(payload)).blocks(slice(0, 40)):
            block.weight = block.weight.clone()  # memory of the next block
            blocks.append(block)
        assert len(blocks) == -(-40 // block_rows)
        assert same_bits(torch.cat([block.weight for block in blocks]), whole.weight)
        states = [block.optimizer["momentum1"] for block in blocks]
        assert same_bits(torch.cat(states), whole.optimizer["momentum1"])
        assert torch.cat([block.ids for block in blocks]).tolist() == list(range(40))


def test_compression_only_where_it_makes_a_chunk_smaller() -> None:
    noise = make_shard(200, 16)
    alike = make_shard(200, 16)
    alike.weight[:] = alike.weight[0]
    for shard in (noise, alike):
        plain = encode_rows(shard.block(torch.arange(200)), TableEncoding(Rowwise(8)))
        packed = encode_rows(
            shard.block(torch.arange(200)), TableEncoding(Rowwise(8), compress=True)
        )
        assert len(packed.getvalue()) <= len(plain.getvalue())
        assert same_bits(decode_rows(*stored(packed)).weight, decode_rows(*stored(plain)).weight)
    assert len(packed.getvalue()) < len(plain.getvalue()) / 10
    entry, payload = stored(packed)
    with pytest.raises(CorruptCheckpoint, match="decompressed"):
        decode_rows(entry, b"!!!!" + payload[4:])
    for raw, message in ((2**40, "more than"), (10, "decompressed|bytes")):
        entry["weight"]["raw"] = raw
        with pytest.raises(CorruptCheckpoint, match=message):
            decode_rows(entry, payload)


def test_the_error_is_measured() -> None:
    shard = make_shard(3000, 16)
    shard.weight[5] = 0
    shard.weight[7] = 2.5
    for bits, low, high in ((8, 1e-4, 1e-2), (4, 1e-2, 2e-1), (2, 1e-1, 1.0)):
        codec = Rowwise(bits, "asymmetric")
        chunk = encode(shard, shard.gather(torch.arange(3000)), codec)
        error = fields(chunk)["error"]
        decoded = decode_rows(*stored(chunk)).weight
        relative = (decoded - shard.weight).norm(dim=1) / shard.weight.norm(dim=1).clamp(min=1e-30)
        assert low < error["mean"] < error["max"] < high
        assert error["mean"] == pytest.approx(float(relative.mean()), rel=0.1)
        assert error["max"] <= float(relative.max()) * (1 + 1e-6)
        assert 500 <= error["sampled_rows"] <= 1024
    one = encode(shard, shard.gather(torch.tensor([9])), Rowwise(8))
    assert fields(one)["error"]["sampled_rows"] == 1
    zeros = encode(shard, shard.gather(torch.tensor([5])), Rowwise(8))
    assert fields(zeros)["error"] == {"mean": 0.0, "max": 0.0, "sampled_rows": 1}
    assert "error" not in fields(encode(shard, shard.gather(torch.arange(9)), Exact()))


def test_a_part_of_a_larger_table_keeps_its_place() -> None:
    shard = make_shard(10, 4, row_start=100, col_start=12)
    entry, _ = stored(encode(shard, shard.gather(torch.tensor([101, 108])), Exact()))
    assert header_of(entry).rectangle == Rectangle(101, 109, 12, 16)
    assert entry["table"] == "sparse.ebc.embedding_bags.täble"


@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_data_type_that_could_not_be_read_again_is_not_written(what: str) -> None:
    narrow = torch.float8_e4m3fn
    shard = make_shard(3, 4, states={"momentum1": (torch.float32, True)})
    if what == "weight":
        shard.weight = shard.weight.to(narrow)
    else:
        shard.optimizer = {"momentum1": shard.optimizer["momentum1"].to(narrow)}
    with pytest.raises(UnsupportedTable, match=r"täble.*float8_e4m3fn.*'float16', 'bfloat16'"):
        encode(shard, shard.gather(torch.arange(3)), Exact())


def test_states_come_back() -> None:
    value = {"samples": 7, "rng": np.arange(5), "weight": torch.ones(2)}
    for rank in (None, 3):
        chunk = state_chunk("reader", rank, *encode_state(value, "reader"))
        entry, payload = stored(chunk)
        assert (entry["kind"], entry["name"], entry["rank"]) == ("state", "reader", rank)
        decoded = decode_stored(entry, payload)
        assert decoded["samples"] == 7
        assert decoded["rng"].tolist() == [0, 1, 2, 3, 4]
        assert decoded["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("positions", [[], [4], [3, 4, 5], [3, 5], [0, 1, 4]])
def test_positions_that_follow_each_other_are_a_range(positions: list[int]) -> None:
    given, every = np.array(positions, np.int64), np.arange(10)
    found = as_range(given)
    assert every[found].tolist() == positions
    assert isinstance(found, slice) == (positions in ([4], [3, 4, 5]))
