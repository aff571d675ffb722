"""Check retention on histories made by hand and on random ones."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import checkpoint_id
from torchrec_checknrun.root.retention import Retention, abandoned_ids, judge

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def make(
    sequence: int,
    parent: Manifest | None = None,
    previous: Manifest | None = None,
    hours: float = 0.0,
    step: int | None = None,
) -> Manifest:
    step = 10 * sequence if step is None else step
    return Manifest(
        id=checkpoint_id(sequence, step, f"{sequence:08x}"),
        sequence=sequence,
        step=step,
        kind="differential" if parent else "full",
        parent=parent.link if parent else None,
        previous=previous.link if previous else None,
        world_size=1,
        created_at=(START + timedelta(hours=hours)).isoformat(timespec="milliseconds"),
        created_by="test",
        lossy_restores=0,
        bits=None,
        tables={},
        states={},
        dense_bytes=0,
        files=(),
    ).sealed()


def compacted(head: Manifest) -> Manifest:
    new = make(head.sequence, None, head, step=head.step)
    id = checkpoint_id(head.sequence, head.step, "ffffffff")
    return replace(new, id=id, created_at=head.created_at).sealed()


def run(kinds: str) -> list[Manifest]:
    """Make a history: ``F`` full, ``c`` consecutive, ``o`` one-shot (since the last full one)."""
    made: list[Manifest] = []
    baseline: Manifest | None = None
    for number, kind in enumerate(kinds, 1):
        last = made[-1] if made else None
        parent = {"F": None, "c": last, "o": baseline}[kind]
        made.append(make(number, parent, last))
        if kind == "F":
            baseline = made[-1]
    return made


def kept(made: list[Manifest], retention: Retention, **more: Any) -> list[int]:
    verdict = judge(made, retention, **more)
    by_id = {manifest.id: manifest.sequence for manifest in made}
    assert verdict.keep.keys() | verdict.delete.keys() <= by_id.keys()
    assert not verdict.keep.keys() & verdict.delete.keys()
    return sorted(by_id[id] for id in by_id.keys() - verdict.delete.keys())


@pytest.mark.parametrize(
    ("kinds", "keep", "stay"),
    [
        ("F", 2, [1]),
        ("FFFF", 2, [3, 4]),
        ("FFFF", 1, [4]),
        ("Fccc", 1, [1, 2, 3, 4]),
        ("FccFcc", 2, [4, 5, 6]),
        ("FccFcc", 3, [4, 5, 6]),
        ("FccF", 2, [1, 2, 3, 4]),
        ("Fooo", 2, [1, 3, 4]),
        ("FooFo", 2, [4, 5]),
        ("FooF", 2, [1, 3, 4]),
    ],
)
def test_the_newest_and_what_they_need(kinds: str, keep: int, stay: list[int]) -> None:
    assert kept(run(kinds), Retention(keep)) == stay


def test_out_of_range() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Retention(0)
    for hours in (0, -1, 1e-320, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            Retention(2, every_hours=hours)


def test_first_of_every_so_many_hours() -> None:
    made: list[Manifest] = []
    for number in range(1, 13):
        made.append(make(number, previous=made[-1] if made else None, hours=0.5 * number))
    # Hours 0.5 to 6: buckets of two hours begin at 0, 2, 4 and 6.
    assert kept(made, Retention(2, every_hours=2)) == [1, 4, 8, 11, 12]


def test_pinned_and_in_use_stay_with_their_chains() -> None:
    made = run("FccFFF")
    assert kept(made, Retention(1), pinned={made[2].id}) == [1, 2, 3, 6]
    assert kept(made, Retention(1), in_use={made[1].id}) == [1, 2, 6]
    assert kept(made, Retention(1), pinned={"of long ago"}) == [6]


def test_a_compacted_checkpoint_is_its_hours_first() -> None:
    first = make(1)
    second = make(2, first, first, hours=1)
    third = make(3, None, second, hours=30)
    fourth = make(4, None, third, hours=60)
    copy = compacted(second)
    daily = Retention(1, every_hours=24)
    assert kept([first, second, copy], Retention(1)) == [2]  # the copy's chain is gone
    assert kept([copy, third, fourth], daily) == [2, 3, 4]
    assert kept([first, second, copy, third, fourth], daily) == [1, 3, 4]
    assert kept([first, second, copy, third, fourth], Retention(3)) == [2, 3, 4]


def test_forks_that_were_left_behind_go_first() -> None:
    first = make(1)
    second, third = make(2, first, first), None
    third = make(3, second, second)
    fork = make(4, first, first)  # the run returned to the first one
    made = [first, second, third, fork]
    verdict = judge(made, Retention(3))
    assert list(verdict.delete) == [third.id, second.id]
    assert "fork" in verdict.delete[third.id]
    assert kept(made, Retention(3)) == [1, 4]
    later = make(5, fork, fork)
    assert kept([*made, later], Retention(1)) == [1, 4, 5]
    older = make(6, None, later)
    assert list(judge([*made, later, older], Retention(1)).delete)[:2] == [third.id, second.id]


def test_a_compacted_checkpoint_is_no_fork() -> None:
    first = make(1)
    second = make(2, first, first)
    third = make(3, second, second)  # the run continues its own chain
    made = [first, second, compacted(second), third]
    assert kept(made, Retention(1)) == [1, 2, 3]
    assert kept(made, Retention(2)) == [1, 2, 2, 3]
    assert not abandoned_ids(made)
    # Only the copy is left of a chain that no other checkpoint needs.
    assert judge(made[:3], Retention(1)).delete == {
        second.id: f"compacted into {made[2].id}",
        first.id: "older than what is kept",
    }
    assert kept(made[:3], Retention(1), damaged={made[2].id}) == [1, 2, 2]
    assert kept(made[:3], Retention(1), in_use={second.id}) == [1, 2, 2]


def test_a_copy_of_one_that_a_user_has_named() -> None:
    """Sort a name without a number, saved through ``dcp.save``, behind any id."""
    first = make(1)
    weekly = replace(make(2, first, first), id="weekly").sealed()
    copy = compacted(weekly)
    made = [first, weekly, copy]
    verdict = judge(made, Retention(1))
    assert dict(verdict.keep) == {copy.id: "one of the newest 1"}
    assert dict(verdict.delete) == {
        "weekly": f"compacted into {copy.id}",
        first.id: "older than what is kept",
    }
    assert kept(made, Retention(2)) == [1, 2]
    # The same where only the copy is left: the run continued its own chain, then went back.
    third = make(3, None, weekly)
    fork = make(4, None, weekly)
    assert abandoned_ids([copy, third, fork]) == {third.id}


def test_a_compacted_checkpoint_is_no_other_point() -> None:
    first = make(1)
    second = make(2, first, first)
    third = make(3, None, second)
    made = [first, second, third, compacted(second)]
    assert not abandoned_ids(made)
    assert kept(made, Retention(1)) == [3]
    assert kept(made, Retention(2)) == [2, 3]
    assert kept(made, Retention(3)) == [1, 2, 3]
    # A run restored from the copy builds on it, and the abandoned fork is recognized.
    fork = make(4, made[3], made[3])
    assert abandoned_ids([*made, fork]) == {third.id}
    assert kept([*made, fork], Retention(1)) == [2, 4]


def test_damaged_ones_are_no_restorable_points() -> None:
    made = run("FFFF")
    # 4 is damaged: 3 and 2 can be restored; 4 may be repaired.
    assert kept(made, Retention(2), damaged={made[3].id}) == [2, 3, 4]
    assert kept(made, Retention(2), damaged={made[1].id}) == [3, 4]
    assert kept(made, Retention(2), damaged={manifest.id for manifest in made}) == [1, 2, 3, 4]
    # 3 builds on 2 and 1, which a compacted copy of 2 would replace.
    made = run("Fcc")
    made.append(compacted(made[1]))
    assert kept(made, Retention(1), damaged={made[2].id}) == [1, 2, 2, 3]
    chain = run("FcFF")
    assert kept(chain, Retention(3), damaged={chain[0].id}) == [1, 2, 3, 4]
    assert kept(chain, Retention(2), damaged={chain[0].id}) == [3, 4]


def test_a_replaced_parent_is_no_parent() -> None:
    first = make(1)
    second = make(2, first, first)
    third = make(3, None, second)
    other = replace(first, created_by="somebody else").sealed()
    assert kept([other, second, third], Retention(1)) == [3]
    assert kept([other, second, third], Retention(2)) == [1, 2, 3]


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    made: list[Manifest] = []
    at: Manifest | None = None
    baselines: dict[str, Manifest] = {}
    for number in range(1, draw(st.integers(1, 12)) + 1):
        if made and draw(st.integers(0, 8)) == 0:
            chains = [m for m in made if m.parent and compacted(m).id not in baselines]
            if chains:
                made.append(compacted(draw(st.sampled_from(chains))))
                baselines[made[-1].id] = made[-1]
        if made and draw(st.integers(0, 4)) == 0:
            at = draw(st.sampled_from(made))  # as a restore does
        kind = draw(st.sampled_from("Fco")) if at is not None else "F"
        parent = None
        if kind == "c":
            parent = at
        elif kind == "o" and at is not None:
            parent = baselines[at.id]
        new = make(number, parent, at, hours=number * draw(st.sampled_from([0.1, 1.0, 5.0])))
        baselines[new.id] = new if parent is None else baselines[parent.id]
        made.append(new)
        at = new
    return made


@settings(max_examples=examples(1000), deadline=None)
@given(
    made=histories(),
    keep=st.integers(1, 4),
    hours=st.sampled_from([None, 1.0, 6.0]),
    data=st.data(),
)
def test_nothing_that_is_needed_goes(
    made: list[Manifest], keep: int, hours: float | None, data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from([manifest.id for manifest in made])))
    verdict = judge(made, Retention(keep, hours), pinned)
    by_id = {manifest.id: manifest for manifest in made}
    stay = by_id.keys() - verdict.delete.keys()
    # The newest one's lineage, read off its links, with the compacted copies of its checkpoints.
    lineage = [max(made, key=lambda manifest: (manifest.sequence, manifest.id))]
    while (link := lineage[-1].previous) is not None:
        lineage.append(by_id[link.id])
    newest = sorted({manifest.sequence for manifest in lineage}, reverse=True)[:keep]
    points = [
        manifest
        for manifest in made
        if manifest.sequence in newest
        and compacted(manifest).id not in by_id.keys() - {manifest.id}
    ]
    assert pinned <= stay
    assert {manifest.id for manifest in points} <= stay
    for id in stay:
        parent = by_id[id].parent
        assert parent is None or parent.id in stay
    # Deleting one after the other leaves the rest complete at every instant.
    left = set(by_id)
    for id in verdict.delete:
        left.discard(id)
        for other in left:
            parent = by_id[other].parent
            assert parent is None or parent.id in left
    # A second judgement keeps the same checkpoints.
    again = judge([by_id[id] for id in stay], Retention(keep, hours), pinned)
    assert not again.delete
    if hours is None and not pinned:
        needed = set()
        for manifest in points:
            at: Manifest | None = manifest
            while at is not None:
                needed.add(at.id)
                at = by_id[at.parent.id] if at.parent else None
        assert stay == needed
