"""Continue every global generator from the checkpoint's place by ``RngState``."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer, PerRank, RngState


def drawn() -> list[float]:
    """Draw from each generator until a whole block of its numbers is used up."""
    normal = random.gauss(0, 1)  # Python's generator keeps a second value back
    numbers = [*np.random.standard_normal(701), *np.random.random(3), normal, random.random()]
    return [*map(float, numbers), *torch.randn(5).tolist(), *torch.rand(3).tolist()]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


def saver(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(root, model=nn.Linear(2, 1), state={"rng": RngState()}, **options)


def test_a_restore_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    with saver(tmp_path) as checkpointer:
        drawn()
        checkpointer.save()
        wanted = drawn()
    torch.manual_seed(77), np.random.seed(77), random.seed(77)
    with saver(tmp_path) as checkpointer:
        checkpointer.restore()
        assert drawn() == wanted


def test_is_declared_per_rank() -> None:
    assert isinstance(RngState(), PerRank)


def test_states_merged_twice_stay_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Save on 2 ranks, restore on 3, and then on 1."""
    rng = RngState()
    assert rng.merge is not None
    states = [rng.state.state_dict()]
    torch.rand(1)
    merged = rng.merge([*states, rng.state.state_dict()])
    again = rng.merge([merged, merged])
    assert again.keys() == merged.keys()
    assert again != merged
    with caplog.at_level(logging.WARNING):
        rng.state.load_state_dict(again)
    assert "seeded anew" in caplog.text


KINDS: dict[str, Any] = {
    "torch.Generator": lambda: torch.Generator().manual_seed(5),
    **{
        f"numpy.random.{bits}": lambda bits=bits: np.random.Generator(getattr(np.random, bits)(5))
        for bits in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
    "RandomState": lambda: np.random.RandomState(5),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(5)),
    "random.Random": lambda: random.Random(5),
}


def drawn_from(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(701, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), *(generator.random() for _ in range(700))]
    halves = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return [*generator.standard_normal(701).tolist(), *halves(0, 9, 3, dtype=np.uint32).tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_programs_own_generators_go_on(tmp_path: Path, kind: str) -> None:
    generator, other = KINDS[kind](), KINDS[kind]()
    drawn_from(generator)
    states = {"rng": RngState(one=generator, other=other)}
    with Checkpointer(tmp_path, model=nn.Linear(2, 1), state=states) as saver:
        saver.save()
        wanted = drawn_from(generator), drawn_from(other)
    again, other = KINDS[kind](), KINDS[kind]()
    drawn_from(other)
    states = {"rng": RngState(other=other, one=again)}
    with Checkpointer(tmp_path, model=nn.Linear(2, 1), state=states) as saver:
        saver.restore()
        assert (drawn_from(again), drawn_from(other)) == wanted
        assert wanted[0] != wanted[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_programs_own_generators_are_seeded_apart(kind: str) -> None:
    one, other = KINDS[kind](), KINDS[kind]()
    rng = RngState(one=one, other=other)
    assert rng.merge is not None
    saved = rng.state.state_dict()
    rng.state.load_state_dict(merged := rng.merge([saved]))
    first = drawn_from(one)
    assert first != drawn_from(other)
    rng.state.load_state_dict(merged)
    assert drawn_from(one) == first
    drawn_from(one)
    assert rng.merge([{**rng.state.state_dict(), "torch": saved["torch"]}]) != merged


def test_generators_that_come_and_go_are_told(caplog: pytest.LogCaptureFixture) -> None:
    before = RngState(stays=random.Random(1), goes=random.Random(2)).state.state_dict()
    stays, new = random.Random(3), random.Random(4)
    with caplog.at_level(logging.WARNING):
        RngState(stays=stays, new=new).state.load_state_dict(before)
    assert "generators ['goes', 'new'] are not in both" in caplog.text
    assert stays.random() == random.Random(1).random()
    assert new.random() == random.Random(4).random()


def test_another_kind_of_generator_is_refused_before_any_is_set() -> None:
    saved = RngState(one=np.random.default_rng(1)).state.state_dict()
    wanted = torch.get_rng_state()
    other = RngState(one=np.random.Generator(np.random.SFC64(1)))
    torch.rand(1)
    moved = torch.get_rng_state()
    with pytest.raises(ValueError, match="'one' was a PCG64 when it was saved, and is a SFC64"):
        other.state.load_state_dict(saved)
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(moved, wanted)


def test_other_values_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"RngState\(seed=…\) takes .* not a int"):
        RngState(seed=5)  # type: ignore[arg-type]  # the mistake
