"""Check the decisions of each policy, and the promises of all on bytes and restores."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from torchrec_checknrun import Consecutive, Full, Intermittent, OneShot
from torchrec_checknrun.format.manifest import Manifest, RankFile, TableTotals
from torchrec_checknrun.policy import Decision, Policy

BASELINE = Manifest("seq-1", 1, 10, "full", None, None, 1, "", "", 0, None, {}, {}, 0, ()).sealed()
HISTORIES = st.integers(1, 30).map(
    lambda n: (
        BASELINE,
        *(
            replace(
                BASELINE, id=f"seq-{i}", sequence=i, kind="differential", parent=BASELINE.link
            ).sealed()
            for i in range(2, n + 1)
        ),
    )
)


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (Full(), Decision.FULL),
        (OneShot(), Decision.SINCE_BASELINE),
        (Consecutive(), Decision.SINCE_LAST),
    ],
)
@settings(max_examples=examples(20), deadline=None)
@given(history=HISTORIES)
def test_decisions_are_the_papers(
    policy: Policy, decision: Decision, history: tuple[Manifest, ...]
) -> None:
    assert policy.decide(history) is decision


def sized(manifest: Manifest, size: int) -> Manifest:
    """Make a manifest of two ranks' files."""
    files = tuple(RankFile(f"rank-{r}", part, 0, 0, "", 0) for r, part in enumerate((size - 7, 7)))
    return replace(manifest, files=files).sealed()


def history_of(sizes: list[float]) -> list[Manifest]:
    """Make a full checkpoint of 1,000,000 bytes, and differential ones of given fractions."""
    history = [sized(BASELINE, 1_000_000)]
    for i, size in enumerate(sizes):
        one = replace(BASELINE, id=f"seq-{i + 2}", kind="differential", parent=BASELINE.link)
        one = replace(one, earlier_fractions=tuple(sizes[:i]))
        history.append(sized(one, round(1_000_000 * size)))
    return history


@pytest.mark.parametrize(
    ("sizes", "decision"),
    [
        ([], Decision.SINCE_BASELINE),  # nothing to predict from
        ([0.26], Decision.SINCE_BASELINE),  # 1.26 > 0.52
        ([0.9], Decision.SINCE_BASELINE),  # 1.9 > 1.8
        ([1.0], Decision.FULL),  # 2 = 2
        ([0.26, 0.5], Decision.SINCE_BASELINE),  # 1.76 > 1.5
        ([0.26, 0.7], Decision.FULL),  # 1.96 < 2.1
        ([0.25, 0.5, 0.5], Decision.SINCE_BASELINE),  # 2.25 > 2
        ([0.25, 0.5, 0.625], Decision.FULL),  # 2.375 < 2.5
        ([0.26, 0.26, 0.26, 0.26], Decision.SINCE_BASELINE),  # no growth: never full
    ],
)
def test_the_predictor_by_hand(sizes: list[float], decision: Decision) -> None:
    assert Intermittent().decide(history_of(sizes)) is decision


@pytest.mark.parametrize(
    ("growth", "cycle"),
    [
        (lambda i: 0.26 * i**0.33, 7),
        (lambda i: 1 - 0.74**i, 4),
        (lambda i: 0.26 * i**0.28, 9),
    ],
)
def test_how_often_it_begins_anew(growth: Callable[[int], float], cycle: int) -> None:
    sizes = [growth(i) for i in range(1, 12)]
    decisions = [Intermittent().decide(history_of(sizes[:n])) for n in range(12)]
    assert decisions.index(Decision.FULL) == cycle - 1


def test_a_restored_history_decides_as_the_whole_one_would() -> None:
    """Decide without the differential checkpoints between the full one and the last."""
    sizes = [0.26, 0.4, 0.63]
    whole = history_of(sizes)
    assert Intermittent().decide(whole) is Intermittent().decide([whole[0], whole[-1]])
    assert Intermittent().decide([whole[0], whole[-1]]) is Decision.FULL  # 2.29 < 2.52
    assert Intermittent().decide(history_of([0.63])) is Decision.SINCE_BASELINE


def test_sizes_count_at_the_same_width() -> None:
    """Compare sizes at the same width: few bits do not make a differential checkpoint small."""
    full = TableTotals(100, 8, 800, value_bits=8)
    less = TableTotals(100, 8, 800, value_bits=2)
    baseline = replace(sized(BASELINE, 10_000), tables={"t": full})
    narrow = replace(sized(BASELINE, 2_500), kind="differential", tables={"t": less})
    assert narrow.fraction_of(baseline) == 1.0
    same = replace(narrow, tables={"t": full})
    assert same.fraction_of(baseline) == 0.25
