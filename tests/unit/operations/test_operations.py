"""Operate a root in any order, by all that people do to one: nothing is lost, nothing is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import OF_HISTORIES, examples
from tests.unit.operations import keeping, running, serving
from tests.unit.operations.world import Action, World, world
from torchrec_checknrun import Consecutive, Full, Intermittent, OneShot, Quantization, Retention

METHODS: dict[str, Quantization | None] = {
    "exact": None,
    "8 bit": Quantization(bits=8, exact_below_rows=0),
    "delta": Quantization(method="delta", step=2.0**-9, exact_below_rows=0),
}
POLICIES = [Consecutive(), OneShot(), Intermittent(), Full()]
ACTIONS: dict[str, Action] = {
    "save": running.save,
    "restart": running.restart,
    "fresh": running.fresh,
    "kill": running.kill,
    "leftover": running.leftover,
    "fall_back": running.fall_back,
    "unlock": running.unlock,
    "take_over": running.take_over,
    "adopt": running.adopt,
    "repair": running.repair,
    "prune": keeping.prune,
    "compact": keeping.compact,
    "pin": keeping.pin,
    "unpin": keeping.unpin,
    "look": keeping.look,
    "follow": serving.follow,
    "publish": serving.publish,
    "save_by_name": serving.save_by_name,
    "export": keeping.export,
    "move": keeping.move,
    "back_up": keeping.back_up,
    "put_back": keeping.put_back,
    "delete": keeping.delete,
    "damage": keeping.damage,
    "damage_manifest": keeping.damage_manifest,
    "damage_claim": keeping.damage_claim,
    "damage_pin": keeping.damage_pin,
    "transplant": keeping.transplant,
}
WEIGHTS = ["save"] * 8 + ["prune"] * 3 + ["compact"] * 2 + ["fall_back", "adopt", "take_over"] * 2
steps = st.lists(
    st.tuples(st.sampled_from([*WEIGHTS, *ACTIONS]), st.integers(0, 11)), min_size=6, max_size=16
)
Steps = list[tuple[str, int]]


def operate(made: World, actions: Steps) -> None:
    """Do what is asked for, and look at everything after each operation."""
    running.save(made, 1)
    for name, choice in actions:
        made.log.append(f"{name} {choice}")
        ACTIONS[name](made, choice)
        made.check()
    keeping.look(made, 0)


@pytest.mark.timeout(3600)
@settings(OF_HISTORIES, max_examples=examples(150, quick=4))
@given(
    method=st.sampled_from(list(METHODS)),
    policy=st.sampled_from(POLICIES),
    keep=st.sampled_from([None, None, 1, 2]),
    compact_after=st.sampled_from([None, 2]),
    actions=steps,
)
def test_any_operations(
    tmp_path_factory: pytest.TempPathFactory,
    method: str,
    policy: Any,
    keep: int | None,
    compact_after: int | None,
    actions: Steps,
) -> None:
    folder: Path = tmp_path_factory.mktemp("operations")
    options = {
        "policy": None if method == "delta" else policy,
        "retention": None if keep is None else Retention(keep),
        "compact_after": compact_after,
    }
    with world(folder, METHODS[method], **options) as made:
        try:
            operate(made, [*actions, ("save", 0), ("restart", 0), ("save", 1)])
        except BaseException:
            print(*made.log, sep="\n")
            raise
