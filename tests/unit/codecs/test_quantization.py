"""Apply the user's choice to each table, and switch the width after too many restores."""

from __future__ import annotations

import sys
import time
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun import Quantization
from torchrec_checknrun.bitwidth import width_for
from torchrec_checknrun.codecs import Codec, Exact, ImportanceWeighted, Method, Rowwise
from torchrec_checknrun.codecs.kmeans import KMeans
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES

BIG = 10**6
ROWWISE = ["adaptive", "asymmetric", "symmetric", "greedy"]


def codec_of(quantization: Quantization, table: str = "t", rows: int = BIG) -> Codec:
    return quantization.for_table(table, rows).codec


def test_exact_is_the_default() -> None:
    quantization = Quantization()
    assert quantization == Quantization(bits=None)
    assert isinstance(codec_of(quantization), Exact)
    encoding = quantization.for_table("t", BIG)
    assert (encoding.optimizer, encoding.compress) == ("fp32", False)
    assert not codec_of(quantization).lossy
    assert quantization.width is None


@pytest.mark.parametrize("method", ROWWISE)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_width_and_a_method(bits: int, method: str) -> None:
    quantization = Quantization(bits=bits, method=method)
    codec = codec_of(quantization)
    assert isinstance(codec, Rowwise)
    assert (codec.bits, codec.method) == (bits, Method[method.upper()])
    assert codec_of(quantization).lossy
    assert quantization.width == bits


def test_adaptive_is_the_default_method() -> None:
    codec = codec_of(Quantization(bits=4))
    assert isinstance(codec, Rowwise)
    assert codec.method is Method.ADAPTIVE


def test_methods_with_widths_of_their_own() -> None:
    importance = codec_of(Quantization(method="importance", mean_bits=3.5))
    assert isinstance(importance, ImportanceWeighted)
    assert importance.mean_bits == 3.5
    assert codec_of(Quantization(method="importance")).value_bits == 4
    for name in ("fp16", "bf16"):
        narrow = codec_of(Quantization(method=name))
        assert (narrow.name, narrow.value_bits, narrow.lossy) == (name, 16, True)
    kmeans = codec_of(Quantization(bits=3, method="kmeans"))
    assert isinstance(kmeans, KMeans)
    assert kmeans.value_bits == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"bits": bits}, r"bits must be None \(exact\), 'auto' or one of \(2, 3, 4, 8\), not")
            for bits in (0, 1, 5, 16, 32, -4, True, 4.0, "4", "automatic")
        ),
        ({"method": "best"}, "method must be one of .*'adaptive'.*not 'best'"),
        ({"bits": 4, "method": "lloyd"}, "method must be one of"),
        *(
            ({"bits": bits, "method": method}, f"{method!r} has widths of its own: leave bits out")
            for bits in (4, "auto")
            for method in ("importance", "fp16", "bf16")
        ),
        ({"bits": "auto"}, "chosen from expected_restores: give it"),
        ({"bits": "auto", "expected_restores": -1}, "0 or more, not -1"),
        ({"bits": 4, "expected_restores": float("nan")}, "0 or more, not nan"),
        ({"bits": 4, "expected_restores": True}, "0 or more, not True"),
        ({"bits": 4, "tables": {7: Quantization()}}, "tables must map patterns to choices"),
        ({"bits": 4, "mean_bits": 4.0}, "parameter of the methods importance"),
        ({"offset": 4.0}, "parameter of method='importance'"),
        ({"method": "importance", "mean_bits": 4.0, "offset": 4.0}, "not both"),
        ({"mean_bits": 4.0}, "parameter of the methods importance"),
        ({"method": "importance", "mean_bits": 9.0}, "between 2 and 8, not 9.0"),
        ({"optimizer": "fp16"}, "optimizer must be one of .*'log8'.*not 'fp16'"),
        (
            {"tables": {"a": Quantization(tables={"b": Quantization()})}},
            "can't have patterns of its own",
        ),
    ],
)
def test_choices_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(**arguments)


def test_kmeans_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at construction, not at the first checkpoint."""
    monkeypatch.setitem(sys.modules, "kmeans1d", None)
    with pytest.raises(ImportError, match=r"\[kmeans\]"):
        Quantization(bits=4, method="kmeans")


def test_a_choice_stays_as_it_is() -> None:
    quantization = Quantization(bits=4)
    with pytest.raises(FrozenInstanceError):
        quantization.bits = 2  # type: ignore[misc]  # mypy sees it, too


@pytest.mark.parametrize(
    ("expected", "bits"), [(0, 2), (1, 2), (2, 3), (3, 3), (3.5, 4), (20, 4), (21, 8), (1000, 8)]
)
@pytest.mark.parametrize("method", ROWWISE)
def test_auto_follows_the_expected_restores(expected: float, bits: int, method: str) -> None:
    quantization = Quantization(bits="auto", method=method, expected_restores=expected)
    resolved = quantization.resolved(0)
    assert (resolved.bits, resolved.width, resolved.method) == (bits, bits, method)
    assert resolved == quantization.resolved(int(expected))
    assert codec_of(resolved).value_bits == codec_of(quantization).value_bits == bits
    assert resolved.resolved(0) == resolved


@pytest.mark.parametrize("bits", ["auto", 2, 3, 4, 8])
@pytest.mark.parametrize("method", [*ROWWISE, "kmeans"])
@pytest.mark.parametrize("expected", [0, 1, 2.5, 20])
def test_more_restores_than_expected(bits: Any, method: str, expected: float) -> None:
    """Switch to 8 bits with the same method."""
    quantization = Quantization(bits=bits, method=method, expected_restores=expected)
    just = int(expected)
    narrow = width_for(expected) if bits == "auto" else bits
    assert quantization.resolved(just).bits == narrow
    for restores in (just + 1, just + 100):
        resolved = quantization.resolved(restores)
        assert (resolved.bits, resolved.width, resolved.method) == (8, 8, method)
        assert codec_of(resolved).value_bits == 8
        assert resolved.resolved(restores) == resolved


def test_a_mixed_width_becomes_eight_bits() -> None:
    quantization = Quantization(method="importance", mean_bits=3, expected_restores=2)
    assert isinstance(codec_of(quantization.resolved(2)), ImportanceWeighted)
    codec = codec_of(quantization.resolved(3))
    assert isinstance(codec, Rowwise)
    assert (codec.bits, codec.method) == (8, Method.ADAPTIVE)


@pytest.mark.parametrize("method", ["adaptive", "fp16", "bf16"])
def test_more_restores_never_take_bits_away(method: str) -> None:
    """Keep exact and 16-bit rows as they are."""
    quantization = Quantization(method=method, expected_restores=1)
    before, after = (codec_of(quantization.resolved(restores)) for restores in (0, 9))
    assert after.value_bits >= before.value_bits >= 16
    assert after.lossy is before.lossy


@pytest.mark.parametrize("bits", [2, 4])
def test_without_an_expectation_no_restore_is_too_many(bits: int) -> None:
    assert Quantization(bits=bits).resolved(10**6) == Quantization(bits=bits)


def test_small_tables_are_exact() -> None:
    quantization = Quantization(bits=4, compress=True)
    assert quantization.exact_below_rows == 1000
    assert isinstance(codec_of(quantization, rows=999), Exact)
    assert isinstance(codec_of(quantization, rows=1000), Rowwise)
    assert quantization.for_table("t", 999).compress
    none = Quantization(bits=4, exact_below_rows=0)
    assert isinstance(codec_of(none, rows=1), Rowwise)
    assert isinstance(codec_of(none.resolved(0), rows=1), Rowwise)
    most = Quantization(method="importance", exact_below_rows=BIG + 1)
    assert isinstance(codec_of(most), Exact)


def test_a_table_has_the_first_choice_whose_pattern_it_matches() -> None:
    quantization = Quantization(
        bits=4,
        tables={
            "ebc.embedding_bags.user*": Quantization(bits=8, compress=True, optimizer="log8"),
            "*.user_1": Quantization(bits=2),
            "ebc.embedding_bags.[ab]": Quantization(),
            "*.item": Quantization(method="importance", mean_bits=3),
        },
    )
    encoding = quantization.for_table("ebc.embedding_bags.user_1", BIG)
    assert (encoding.codec.value_bits, encoding.compress, encoding.optimizer) == (8, True, "log8")
    assert codec_of(quantization, "other.user_1").value_bits == 2
    assert isinstance(codec_of(quantization, "ebc.embedding_bags.b"), Exact)
    assert isinstance(codec_of(quantization, "ebc.embedding_bags.item"), ImportanceWeighted)
    for unmatched in ("ebc.embedding_bags.c", "EBC.embedding_bags.user", "other.user_10", "item"):
        encoding = quantization.for_table(unmatched, BIG)
        assert (encoding.codec.value_bits, encoding.compress) == (4, False)


def test_the_first_of_names_and_patterns_counts() -> None:
    two, three, four = (Quantization(bits=bits) for bits in (2, 3, 4))
    for tables, bits in (
        ({"a.b": two, "a.*": three}, 2),
        ({"a.*": three, "a.b": two}, 3),
        ({"a.c": four, "?.b": three, "a.b": two}, 3),
        ({"a.c": four, "a.b": two, "*": three}, 2),
        ({"a[.]b": four, "a.b": two}, 4),
        ({"A.b": four, "a.B": four}, 8),
    ):
        chosen = Quantization(bits=8, tables=tables).for_table("a.b", 10**6)
        assert chosen.codec.value_bits == bits, tables


def test_choices_for_many_tables_take_no_time() -> None:
    """Give each table a choice of its own, as where no table's references have room."""
    names = [f"sparse.ebc.embedding_bags.table_{i}" for i in range(4000)]
    quantization = Quantization(method="delta").without_links(names)
    began = time.perf_counter()
    codecs = {quantization.for_table(name, 10**6).codec.name for name in names}
    assert codecs == {"fisher"}
    assert time.perf_counter() - began < 1  # a pair of tables takes 0.4 µs: 6 s


def test_a_pattern_counts_for_small_tables_too() -> None:
    quantization = Quantization(bits=4, tables={"tiny": Quantization(bits=8)})
    assert codec_of(quantization, "tiny", 3).value_bits == 8
    assert isinstance(codec_of(quantization, "small", 3), Exact)


def test_choices_for_patterns_are_resolved_too() -> None:
    """Use a pattern's own expected restores, or else the default's."""
    quantization = Quantization(
        bits=2,
        expected_restores=1,
        tables={
            "auto": Quantization(bits="auto", expected_restores=20),
            "fixed": Quantization(bits=4),
            "exact": Quantization(),
        },
    )
    rows = dict.fromkeys(["auto", "fixed", "exact", "other"], BIG)
    expected = {
        1: {"auto": 4, "fixed": 4, "exact": 32, "other": 2},
        2: {"auto": 4, "fixed": 8, "exact": 32, "other": 8},
        21: {"auto": 8, "fixed": 8, "exact": 32, "other": 8},
    }
    for restores, widths in expected.items():
        resolved = quantization.resolved(restores)
        assert resolved.widths(rows) == widths
        assert list(resolved.tables) == list(quantization.tables)


def test_an_exact_job_with_quantized_tables() -> None:
    quantization = Quantization(expected_restores=1, tables={"big*": Quantization(bits=2)})
    tables = {"big_1": BIG, "other": BIG, "small": 10}
    assert quantization.resolved(1).widths(tables) == {"big_1": 2, "other": 32, "small": 32}
    assert quantization.resolved(2).widths(tables) == {"big_1": 8, "other": 32, "small": 32}
    assert quantization.resolved(2).width is None


def test_widths_are_given_by_table() -> None:
    quantization = Quantization(bits=3, tables={"half": Quantization(method="fp16")})
    tables = {"a": BIG, "half": BIG, "small": 999}
    assert quantization.widths(tables) == {"a": 3, "half": 16, "small": 32}
    assert quantization.widths({}) == {}


@given(
    st.sampled_from([None, "auto", 2, 3, 4, 8]),
    st.floats(0, 100),
    st.integers(0, 200),
    st.integers(0, 5000),
)
def test_restores_never_make_a_table_narrower(
    bits: Any, expected: float, restores: int, rows: int
) -> None:
    """Never lower a lineage's width, so that one full checkpoint is enough."""
    quantization = Quantization(bits=bits, expected_restores=expected)
    widths = [quantization.resolved(n).widths({"t": rows})["t"] for n in (0, restores, 1000)]
    assert widths == sorted(widths)


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_the_optimizer_scheme_reaches_tables(scheme: str) -> None:
    encoding = Quantization(bits=4, optimizer=scheme).for_table("t", BIG)
    assert encoding.optimizer == scheme


def test_a_codec_of_a_choice_encodes() -> None:
    rows = torch.randn(40, 12)
    for quantization in (Quantization(bits="auto", expected_restores=2), Quantization(bits=8)):
        codec = codec_of(quantization)
        encoded, out = codec.encode(rows), torch.empty_like(rows)
        codec.decode(encoded.data.view(-1), encoded.parameters, 40, 0, out)
        assert float((out - rows).norm() / rows.norm()) < 0.2
