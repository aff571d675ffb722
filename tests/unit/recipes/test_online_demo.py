"""Check the answers of the online demo, and tell scores and lags of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.dlrm_criteo.demo import Unmet
from recipes.dlrm_criteo.online_demo.__main__ import main
from recipes.dlrm_criteo.online_demo.outcome import (
    FIRST,
    FOLLOWED,
    HEADINGS,
    RELOADED,
    TRUTH,
    Question,
    Versions,
    check_answers,
    markdown,
    measure,
)
from recipes.dlrm_criteo.online_demo.served import Answer
from recipes.dlrm_criteo.online_demo.watch import Moment, lags

REPOSITORY = Path(__file__).parents[3]
RESULT = REPOSITORY / "recipes/results/online.json"
PAGE = REPOSITORY / "docs/how-to/online_training.md"

BATCH = 10
TRAINED = {step: step * BATCH for step in range(100)}
COMMITTED = {f"v{step}": Moment(step, 100.0 + step) for step in (1, 3, 5)}


def question(number: int, step: int, certainty: float = 0.5) -> Question:
    """Ask about the samples of one step; all models answer at a version's step, and are right."""
    labels = np.tile([0.0, 1.0], BATCH // 2)
    answer = Answer(np.where(labels > 0, certainty, 1 - certainty), f"v{step}", step)
    answers = dict.fromkeys((FOLLOWED, FIRST, RELOADED), answer)
    return Question(number * BATCH, labels, answers, truth=None)


def versions() -> dict[str, Versions]:
    return dict.fromkeys((FOLLOWED, FIRST, RELOADED), Versions([], 7, COMMITTED))


def questions() -> list[Question]:
    return [question(1, 1), question(2, 1), question(3, 3), question(6, 5)]


def spoiled(at: int, name: str, **changes: Any) -> list[Question]:
    """Change one answer of one model."""
    asked = questions()
    answers: Mapping[str, Answer] = asked[at].answers
    changed = {**answers, name: answers[name]._replace(**changes)}
    asked[at] = replace(asked[at], answers=changed)
    return asked


def test_answers_of_versions_that_had_not_seen_the_samples() -> None:
    check_answers(questions(), versions(), TRAINED.get)


@pytest.mark.parametrize("name", [FOLLOWED, FIRST, RELOADED])
@pytest.mark.parametrize(
    ("at", "changes", "why"),
    [
        (2, {"id": "v5", "step": 5}, "had not seen them, but 50 samples"),
        (1, {"id": "v2", "step": 2}, "v2 was committed"),
        (3, {"id": "v3"}, "v3 is of 5"),
        (3, {"id": "v1", "step": 1}, "versions never go back"),
        (3, {"predictions": np.zeros(BATCH - 1)}, "answers for all"),
    ],
)
def test_any_other_answer_fails_the_demo(
    name: str, at: int, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unmet, match=rf"{name}.*{why}"):
        check_answers(spoiled(at, name, **changes), versions(), TRAINED.get)


def test_a_step_that_was_never_trained() -> None:
    with pytest.raises(Unmet, match="of a step that was trained, 5"):
        check_answers(questions(), versions(), {1: 10, 3: 30}.get)


def test_lags_are_until_the_first_version_that_has_it() -> None:
    steps = [Moment(step, float(step)) for step in range(1, 7)]
    shown = [Moment(5, 6.5), Moment(2, 2.5), Moment(5, 9.0)]
    # Steps 1 and 2 by the version of step 2, steps 3 to 5 by that of step 5, step 6 by none.
    assert lags(steps, shown) == [1.5, 0.5, 3.5, 2.5, 1.5]


def test_scores_of_all_samples_and_of_each_part() -> None:
    asked = [question(n, 1, certainty) for n, certainty in enumerate([0.6, 0.6, 0.8, 0.8, 0.9])]
    known = [replace(each, truth=each.answers[FIRST].predictions) for each in asked]
    trained = [Moment(step, 100.0 + step) for step in range(5)]
    shown = [Moment(5, 107.0)]
    behind = {
        FOLLOWED: Versions(shown, 7, COMMITTED),
        FIRST: Versions([], 3, COMMITTED, follows=False),
    }
    found = measure(known, behind, trained, since=103.0)
    assert found[FOLLOWED]["samples"] == 5 * BATCH
    parts = -np.log([0.6, 0.6, 0.8, 0.8, 0.9])
    assert found[FOLLOWED]["logloss_by_part"] == pytest.approx(parts)
    assert found[FOLLOWED]["logloss"] == pytest.approx(parts.mean())
    assert found[FOLLOWED]["auc"] == 1.0
    assert found[TRUTH]["logloss"] == found[FIRST]["logloss"]
    # Of what happened since the first question: steps 3 and 4; versions of the steps 3 and 5.
    assert found[FOLLOWED]["step_to_visible"] == {"median": 3.5, "worst": 4.0, "count": 2}
    assert found[FOLLOWED]["commit_to_visible"] == {"median": 3.0, "worst": 4.0, "count": 2}
    assert "step_to_visible" not in found[FIRST]
    lines = markdown(found).splitlines()
    assert all(line.count("|") == len(HEADINGS) + 1 for line in lines)
    assert "3.50 s, 4.00 s" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--data", "/no/such/file"], "no such file"),
        (["--seconds", "0"], "expected a positive number"),
        (["--seconds", "nan"], "expected a positive number"),
        (["--drift", "-1"], "expected 0"),
    ],
)
def test_arguments_that_no_run_can_obey(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_page_shows_the_committed_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--markdown", str(RESULT)]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in PAGE.read_text()
    models = json.loads(RESULT.read_text())["models"]
    assert len({found["samples"] for found in models.values()}) == 1
    assert models[FOLLOWED]["logloss"] < models[RELOADED]["logloss"] < models[FIRST]["logloss"]
