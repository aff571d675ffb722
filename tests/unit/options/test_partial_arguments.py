"""Arguments of partial recovery, rules of lost states, and the clocks of lost tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.run.jobs import checkpointer, make_job
from torchrec_checknrun import Images, PartialRecovery, PerRank, RngState
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.recovery.partial_recovery import clocks_at

pytestmark = pytest.mark.usefixtures("one_rank")

ALL = PartialRecovery(max_pls=1, total_steps=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial": ALL}, r"it needs survive=Images\(\)"),
        ({"partial": 0.01, "survive": Images()}, r"partial must be PartialRecovery\(max_pls="),
    ],
)
def test_arguments_are_checked(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checkpointer(tmp_path / "root", make_job(), **options)


def test_a_rule_is_copy_or_a_function() -> None:
    with pytest.raises(ValueError, match="lost must be 'copy', a function of a state dict"):
        PerRank(make_job(), lost="clone")


def test_states_are_merged_by_a_function() -> None:
    with pytest.raises(ValueError, match="merge must be a function of a list of states, not sum"):
        PerRank(make_job(), merge="sum")  # type: ignore[arg-type]  # mypy sees it, too


def test_a_lost_ranks_generators_are_seeded_anew() -> None:
    rng = RngState()
    torch.manual_seed(3)
    saved = rng.state.state_dict()
    drawn = torch.rand(4)
    assert callable(rng.lost)
    again = []
    for steps in (2, 3, 2):
        rng.state.load_state_dict(rng.lost(saved, steps))
        again.append(torch.rand(4))
    assert torch.equal(again[0], again[2])
    assert not torch.equal(again[0], again[1])
    assert not any(torch.equal(drawn, other) for other in again)


def clock(step: int, rate: float, **options: float) -> OptimizerClock:
    return OptimizerClock(
        step, rate, {"kernel.step": step, **{f"kernel.{name}": v for name, v in options.items()}}
    )


def test_clocks_of_lost_tables_go_on_as_their_peers() -> None:
    saved = {
        "lost": clock(10, 0.1, eps=0.5),
        "peer": clock(10, 0.1, eps=0.5),
        "slow": clock(10, 0.01, eps=0.25),
        "shared": clock(10, 0.1),
    }
    survivors = [
        {"peer": clock(16, 0.05, eps=0.125), "shared": clock(16, 0.05)},
        {"slow": clock(16, 0.01, eps=0.25)},
    ]
    own = {"lost": clock(0, 1.0), "shared": clock(0, 1.0), "unknown": clock(0, 1.0)}
    assert clocks_at(own, survivors, saved, 3) == {
        "lost": clock(16, 0.05, eps=0.125),
        "shared": clock(16, 0.05),
    }


def test_clocks_without_a_peer_count_steps() -> None:
    saved = {"lost": clock(10, 0.1)}
    assert clocks_at(saved, [{}], saved, 3) == {"lost": clock(13, 0.1)}
    dense = {"lost": OptimizerClock(None, 0.1)}
    assert clocks_at(dense, [{}], dense, 3) == dense
