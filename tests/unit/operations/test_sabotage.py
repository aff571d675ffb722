"""Break what the machine of all operations watches over: it must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some_of
from tests.unit.operations.test_operations import METHODS, Steps, operate
from tests.unit.operations.world import world
from torchrec_checknrun import Consecutive, Full, Retention
from torchrec_checknrun.compaction import compact as compaction
from torchrec_checknrun.restore.chunks import ChainContent
from torchrec_checknrun.root import catalog, chain, lineage, prune, retention
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover, verify

Break = Callable[[pytest.MonkeyPatch], None]


def parents_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "_needs", lambda *_: [])


def a_live_run_s_parent_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prune, "next_parents", lambda *_, **__: [])


def what_an_adopted_one_needs_goes(patch: pytest.MonkeyPatch) -> None:
    def judge_without_others(*arguments: Any, **options: Any) -> retention.Verdict:
        return retention.judge(*arguments[:5])

    patch.setattr(prune, "judge", judge_without_others)
    patch.setattr(prune, "with_parents", lambda _, ids: set(ids))


def pins_are_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prune, "is_pinned", lambda _: False)


def forks_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "_abandoned", lambda *_: set())


def cut_manifests_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prune, "is_cut", lambda *_: False)


def copies_stand_in_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chain, "_find_copy", lambda *_: None)
    for module in (lineage, catalog, retention):
        patch.setattr(module, "copy_among", lambda *_: None)


def adoption_hides_the_others(patch: pytest.MonkeyPatch) -> None:
    advance = takeover._advance

    def only_the_last(root: Any, claims: Any, counting: Any) -> None:
        advance(root, claims, lambda: [*counting()][-1:])

    patch.setattr(takeover, "_advance", only_the_last)


def nothing_is_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify._Verification, "verify", lambda _, one: verify._verified(one, 0, []))


def a_fall_back_builds_on_what_it_left(patch: pytest.MonkeyPatch) -> None:
    restored = Lineage.restored

    def keep_the_history(lineage: Lineage, *arguments: Any, **options: Any) -> None:
        before = lineage.history, lineage._chain, lineage.previous
        restored(lineage, *arguments, **options)
        if before[0]:
            lineage.history, lineage._chain, lineage.previous = before

    patch.setattr(Lineage, "restored", keep_the_history)


def a_copy_lacks_rows(patch: pytest.MonkeyPatch) -> None:
    read = compaction.read_content

    def without_a_link(folder: Folder, found: chain.Chain) -> ChainContent:
        return read(folder, chain.Chain((*found.manifests[:-2], found.head)))

    patch.setattr(compaction, "read_content", without_a_link)


SAVES: Steps = [("save", 0)] * 3
ADOPTED: Steps = [("take_over", 3), ("kill", 1), ("adopt", 0), ("prune", 1)]
KILLED: Steps = [("kill", 1), ("prune", 1)]
CASES: list[tuple[Break, str, int | None, Steps]] = [
    (parents_go, "exact", None, [*SAVES, ("prune", 3)]),
    (a_live_run_s_parent_goes, "exact", None, [*SAVES, ("compact", 3), ("prune", 3)]),
    (what_an_adopted_one_needs_goes, "exact", None, ADOPTED),
    (pins_are_nothing, "full", None, [*SAVES, ("pin", 1), ("prune", 3)]),
    (forks_are_forgotten, "full", None, [*SAVES, ("fall_back", 2), *SAVES[:1], *KILLED]),
    (cut_manifests_count, "full", 2, [("kill", 1), *SAVES[:2], ("damage_manifest", 3), *SAVES]),
    (copies_stand_in_for_nothing, "delta", None, [*SAVES, ("compact", 3), *SAVES, ("delete", 4)]),
    (adoption_hides_the_others, "exact", None, ADOPTED),
    (nothing_is_verified, "exact", None, [*SAVES, ("damage", 2), ("look", 0)]),
    (a_fall_back_builds_on_what_it_left, "exact", None, [*SAVES, ("fall_back", 2), *SAVES]),
    (a_copy_lacks_rows, "exact", None, [*SAVES, ("compact", 3)]),
]


def test_what_is_to_be_broken_is_there() -> None:
    """Most of the cases run in the long tests alone, after names have changed."""
    for broken, *_ in CASES:
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)


@pytest.mark.parametrize(("broken", "method", "keep", "actions"), some_of(CASES, 1, 2))
def test_what_is_broken_is_found(
    tmp_path: Path, broken: Break, method: str, keep: int | None, actions: Steps
) -> None:
    options = {
        "policy": {"full": Full(), "delta": None}.get(method, Consecutive()),
        "retention": None if keep is None else Retention(keep),
        "dense": "whole",  # of rows alone nobody but the machine can tell that some are missing
    }
    with world(tmp_path / "sound", METHODS.get(method), **options) as made:
        operate(made, actions)
    with (
        world(tmp_path / "broken", METHODS.get(method), **options) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        broken(patch)
        with pytest.raises(AssertionError) as found:
            operate(made, actions)
        assert "internal error" not in str(found.value)
