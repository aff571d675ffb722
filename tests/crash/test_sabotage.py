"""The demo's checks find every broken thing: one of them, and they turn red."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.dlrm_criteo import demo
from recipes.dlrm_criteo.final_state import compare
from tests.crash.sabotage import DONE

# The kill comes soon after a checkpoint, so that the next one is far even on a busy machine.
PLAN = demo.Plan(
    steps=36,
    interval=6,
    kill_at=25,
    overrides=(
        "dataset=synthetic",
        "dataset.samples=100_000",
        "trainer.batch_size=1024",
        "trainer.eval_samples=256",
    ),
)
TRAINER = "recipes.dlrm_criteo.train"
STATES_DIFFER = "ends where the others do, but"


def sabotage(name: str) -> str:
    return f"tests.crash.sabotage.{name}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> demo.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        root = tmp_path_factory.mktemp("sabotage")
        return demo.train("uninterrupted", root, PLAN, [], TRAINER, kill=False)


@pytest.mark.slow
@pytest.mark.parametrize("module", [TRAINER, sabotage("failing_save"), sabotage("held_back")])
def test_green(module: str, uninterrupted: demo.Run, tmp_path: Path) -> None:
    killed = demo.train("killed", tmp_path, PLAN, [], module, kill=True)
    assert "equal bit for bit" in demo.check_runs(uninterrupted, killed, exact=True)
    took_place = DONE in (killed.directory / "output.log").read_text()
    assert took_place == (module != TRAINER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dropped_mark", STATES_DIFFER),
        ("dropped_optimizer_row", STATES_DIFFER),
        # From the checkpoint of step 18 or 24, whichever was durable when the kill came.
        ("skipped_batch", r"step (19|25) goes on at sample (18432, not 19456|24576, not 25600)"),
        ("lost_marks", STATES_DIFFER),
        ("unprotected_table", STATES_DIFFER),
        ("unprotected_state", STATES_DIFFER),
        ("unprotected_parameters", STATES_DIFFER),
        ("unprotected_dense_states", STATES_DIFFER),
    ],
)
def test_red(name: str, reason: str, uninterrupted: demo.Run, tmp_path: Path) -> None:
    killed = demo.train("killed", tmp_path, PLAN, [], sabotage(name), kill=True)
    assert DONE in (killed.directory / "output.log").read_text()
    with pytest.raises(demo.Unmet, match=reason):
        demo.check_runs(uninterrupted, killed, exact=True)
    assert not compare(uninterrupted.final_state, killed.final_state).equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropped_mark", "dropped_optimizer_row", "skipped_batch"])
def test_the_command_fails(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--runs", str(tmp_path), "--module", sabotage(name)]) == 1
    out, error = capfd.readouterr()
    assert "DEMO FAILED: " in error
    assert "DEMO OK" not in out
