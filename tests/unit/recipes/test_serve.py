"""Ask the server of the recipe, a process of its own, good and bad questions."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from recipes.dlrm_criteo import serve
from recipes.dlrm_criteo.serving.app import PAGE
from tests.examples import some_of
from tests.scripting import SCRIPTS
from tests.unit.recipes.asked import (
    PATIENCE,
    Server,
    newest,
    question,
    rows,
    some,
    train,
    wanted,
)

pytestmark = SCRIPTS  # the server does


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    train(folder, 2)
    return folder


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[Server]:
    with Server(run_dir / "checkpoints") as server:
        server.wait_for(2)
        yield server


def test_predictions_follow_training(server: Server, run_dir: Path) -> None:
    root, samples = run_dir / "checkpoints", some()
    first = server.predict(samples)
    assert first["version"]["step"] == 2
    np.testing.assert_allclose(first["predictions"], wanted(root, samples), rtol=0)
    step = train(run_dir, 8)
    assert step > 2
    version = server.wait_for(step)
    assert version["rows_applied"] > 0
    assert version["error"] is None
    then = server.predict(samples)
    assert then["version"] == {"id": version["id"], "step": step}
    assert then["predictions"] != first["predictions"]
    np.testing.assert_allclose(then["predictions"], wanted(root, samples), rtol=0)


def bad_questions() -> dict[str, tuple[bytes, str]]:
    """Name requests, with a part of what is said of each."""
    good = some(2)
    dense, ids = good.dense.tolist(), good.sparse.tolist()

    def with_dense(value: Any) -> bytes:
        return question(good, dense=[[value, *dense[0][1:]], dense[1]])

    def with_id(value: Any) -> bytes:
        return question(good, ids=[[value, *ids[0][1:]], ids[1]])

    return {
        "empty body": (b"", "body"),
        "no JSON": (b"dense", "body"),
        "not UTF-8": (b'{"dense": "\xff"}', "body"),
        "deep": (b"[" * 100_000, "body"),
        "a list": (b"[]", "body"),
        "no ids": (b'{"dense": []}', "ids"),
        "nothing": (b'{"dense": [], "ids": []}', "dense"),
        "more": (question(good, labels=[0, 1]), "labels"),
        "null": (with_dense(None), "dense.0.0"),
        "text": (with_dense("1"), "dense.0.0"),
        "true": (with_dense(True), "dense.0.0"),
        "NaN": (with_dense(float("nan")), "dense.0.0"),
        "infinity": (with_dense(float("inf")), "dense.0.0"),
        "beyond fp32": (with_dense(1e300), "dense.0.0"),
        "negative id": (with_id(-1), "ids.0.0"),
        "true as id": (with_id(True), "ids.0.0"),
        "a fraction as id": (with_id(0.5), "ids.0.0"),
        "beyond the table": (with_id(int(rows()[0])), f"cat_0 has {rows()[0]} rows"),
        "beyond 64 bits": (with_id(2**70), "ids.0.0"),
        "ragged": (question(good, ids=[ids[0], ids[1][:-1]]), "ids.1"),
        "unequal": (question(good, ids=ids[:1]), "ids"),
        "too many": (question(some(65)), "at most 64"),
    }


def test_bad_questions_are_refused(server: Server) -> None:
    for name, (body, part) in bad_questions().items():
        status, text = server.ask("POST", "/predict", body)
        assert (status, part in text) == (422, True), (name, status, text)
    status, text = server.ask("POST", "/predict", b" " * (64 * 2048 + 1))
    assert (status, "fewer samples" in text) == (413, True)
    assert server.ask("GET", "/predict")[0] == 405
    assert server.ask("GET", "/nothing")[0] == 404
    assert server.ask("POST", "/predict", question(some()))[0] == 200


def test_the_page_asks_for_what_there_is(server: Server) -> None:
    status, text = server.ask("GET", "/")
    assert (status, text) == (200, PAGE.read_text())
    asked = re.findall(r'fetch\("(\w+)"\)', text)
    assert asked == ["version", "metrics"]
    assert not re.search(r"https?://", text)
    version = json.loads(server.ask("GET", "/version")[1])
    assert set(re.findall(r"found\.(\w+)", text)) - {"detail"} <= version.keys()
    numbers = dict(line.split(" ")[:2] for line in server.ask("GET", "/metrics")[1].splitlines())
    assert set(re.findall(r"all\.(\w+)", text)) <= numbers.keys()


def test_metrics(server: Server) -> None:
    def numbers() -> dict[str, float]:
        lines = server.ask("GET", "/metrics")[1].splitlines()
        return {k: float(v) for k, _, v in (s.rpartition(" ") for s in lines if s[0] != "#")}

    before = numbers()
    server.ask("POST", "/predict", question(some(7)))
    server.ask("POST", "/predict", b"{}")
    after = numbers()
    assert after["dlrm_predictions_total"] - before["dlrm_predictions_total"] == 7
    assert after["dlrm_predict_seconds_count"] - before["dlrm_predict_seconds_count"] == 1
    assert after['dlrm_refused_total{status="422"}'] >= 1
    assert after["dlrm_version_step"] >= 2
    assert after["dlrm_rows_applied_total"] > 0
    assert after["dlrm_bytes_read_total"] > 0
    assert after["dlrm_following_fails"] == 0


def test_before_the_first_version_and_after_the_storage_is_gone(
    run_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "later"
    with Server(root) as server:
        status, text = server.ask("POST", "/predict", question(some()))
        assert (status, "no version is served yet" in text) == (503, True)
        assert server.ask("GET", "/version")[0] == 503
        shutil.copytree(run_dir / "checkpoints", tmp_path / "copy")
        (tmp_path / "copy").rename(root)
        server.wait_for(newest(root))
        shutil.rmtree(root)
        assert server.ask("POST", "/predict", question(some()))[0] == 200
        assert server.end() == 0


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(tmp_path, f"port={port}")
        assert server.process.wait(PATIENCE) == 1
    assert server.port == 0


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT], 1))
def test_ends_when_told(tmp_path: Path, number: int) -> None:
    server = Server(tmp_path)
    assert server.ask("GET", "/metrics")[0] == 200
    assert server.end(number) == 0


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("share=0", "share is 0; choose a part of a core"),
        ("share=1.5", "share is 1.5; choose a part of a core"),
        ("bits=3", "bits is 3; choose 32, 8, 4 or 2"),
        ("threads=0", "threads, most_samples and interval_seconds have to be above zero"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, override: str, reason: str) -> None:
    with initialize_config_dir(str(serve.CONFIGS), version_base=None):
        config = compose("serve", [f"root={tmp_path}", override])
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with pytest.raises(SystemExit, match=reason):
            serve.main.__wrapped__(config)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
