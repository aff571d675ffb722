"""Ask the server of the recipe, a process of its own, good and bad questions."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from recipes.dlrm_criteo.reader import to_batch
from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.serve import CONFIGS, inference_model
from recipes.dlrm_criteo.serving.app import PAGE
from torchrec_checknrun import Follower

MODEL = ("model=dlrm_tiny", "model.scale=0.001")
PATIENCE = 120.0


class Server:
    """A server's process, its port and all that it prints."""

    def __init__(self, root: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "recipes.dlrm_criteo.serve", f"root={root}", "port=0"),
                *("interval_seconds=0.2", "most_samples=64", *MODEL, *more),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.port = 0
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def wait_for(self, step: int) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            status, text = self.ask("GET", "/version")
            if status == 200 and json.loads(text)["step"] == step:
                found: dict[str, Any] = json.loads(text)
                return found
            time.sleep(0.05)
        raise AssertionError(f"step {step} is never served: {text}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode


def train(run_dir: Path, steps: int) -> int:
    """Train from the newest checkpoint on; return the step of the newest one then."""
    subprocess.run(
        [
            *(sys.executable, "-m", "recipes.dlrm_criteo.train", *MODEL, f"run_dir={run_dir}"),
            *("checkpoint=check_n_run", "checkpoint.every_steps=2", f"trainer.steps={steps}"),
            *("trainer.batch_size=16", "trainer.eval_samples=16", "dataset.samples=4000"),
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    return newest(run_dir / "checkpoints")


def newest(root: Path) -> int:
    manifest = max(root.glob("seq-*/manifest.json")).read_text()
    step: int = json.loads(manifest)["manifest"]["step"]
    return step


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    train(folder, 2)
    return folder


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[Server]:
    server = Server(run_dir / "checkpoints")
    try:
        server.wait_for(2)
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def rows() -> np.ndarray:
    return np.array(architecture().num_embeddings_per_feature)


def architecture() -> Any:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return instantiate(compose("serve", ["root=none", *MODEL]).model)


def some(count: int = 5) -> Samples:
    draw = np.random.default_rng(3)
    dense = draw.normal(size=(count, 13)).astype(np.float32)
    ids = draw.integers(0, rows(), size=(count, 26))
    return Samples(dense, ids, np.zeros(count, np.float32))


def question(samples: Samples, **other: Any) -> bytes:
    asked = {"dense": samples.dense.tolist(), "ids": samples.sparse.tolist(), **other}
    return json.dumps(asked).encode()


def wanted(root: Path, samples: Samples) -> np.ndarray:
    """Return what a model built anew from the newest checkpoint predicts."""
    follower = Follower(root, inference_model(architecture(), 8))
    follower.poll()
    batch = to_batch(samples, torch.device("cpu"))
    with follower.read() as (model, _), torch.no_grad():
        logits: torch.Tensor = model(batch.dense_features, batch.sparse_features)
    return np.asarray(logits.reshape(-1).double().sigmoid().numpy())


def test_predictions_follow_training(server: Server, run_dir: Path) -> None:
    root, samples = run_dir / "checkpoints", some()
    status, text = server.ask("POST", "/predict", question(samples))
    first = json.loads(text)
    assert status == 200
    assert first["version"]["step"] == 2
    np.testing.assert_allclose(first["predictions"], wanted(root, samples), rtol=1e-6)
    step = train(run_dir, 8)
    assert step > 2
    version = server.wait_for(step)
    assert version["rows_applied"] > 0
    assert version["error"] is None
    then = json.loads(server.ask("POST", "/predict", question(samples))[1])
    assert then["version"] == {"id": version["id"], "step": step}
    assert then["predictions"] != first["predictions"]
    np.testing.assert_allclose(then["predictions"], wanted(root, samples), rtol=1e-6)


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
    assert re.search(r"^dlrm_predictions_total \d", server.ask("GET", "/metrics")[1], re.MULTILINE)


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
    server = Server(root)
    try:
        status, text = server.ask("POST", "/predict", question(some()))
        assert (status, "no version is served yet" in text) == (503, True)
        assert server.ask("GET", "/version")[0] == 503
        shutil.copytree(run_dir / "checkpoints", tmp_path / "copy")
        (tmp_path / "copy").rename(root)
        server.wait_for(newest(root))
        shutil.rmtree(root)
        assert server.ask("POST", "/predict", question(some()))[0] == 200
        assert server.end() == 0
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(tmp_path, f"port={port}")
        assert server.process.wait(PATIENCE) == 1
    assert server.port == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_when_told(tmp_path: Path, number: int) -> None:
    server = Server(tmp_path)
    assert server.ask("GET", "/metrics")[0] == 200
    assert server.end(number) == 0
