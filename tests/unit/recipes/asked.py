"""Start the recipe's server, train what it serves, and know what it has to answer."""

from __future__ import annotations

import http.client
import json
import re
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from recipes.dlrm_criteo.reader import to_batch
from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.serve import CONFIGS, inference_model
from tests.distributed.forked import Forked
from torchrec_checknrun import Follower

MODEL = ("model=dlrm_tiny", "model.scale=0.001")
PATIENCE = 240.0


class Server:
    """A server's process, and its port."""

    def __init__(self, root: Path, *more: str, module: str = "recipes.dlrm_criteo.serve") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        log = Path(self._folder.name) / "log"
        self.process = Forked(
            *(module, f"root={root}", "port=0"),
            *("interval_seconds=0.2", "most_samples=64", *MODEL, *more),
            log=log,
        )
        self.port = 0
        while not self.port and self.process.poll() is None:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)\D", log.read_text()):
                self.port = int(found[1])
            time.sleep(0.01)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()

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

    def predict(self, samples: Samples) -> dict[str, Any]:
        status, text = self.ask("POST", "/predict", question(samples))
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def train(run_dir: Path, steps: int) -> int:
    """Train from the newest checkpoint on; return the step of the newest one then."""
    with tempfile.TemporaryDirectory(prefix="trained-") as folder:
        log = Path(folder) / "log"
        trained = Forked(
            *("recipes.dlrm_criteo.train", *MODEL, f"run_dir={run_dir}"),
            *("checkpoint=check_n_run", "checkpoint.every_steps=2", "checkpoint.when_busy=wait"),
            *("checkpoint.keep=null", f"trainer.steps={steps}"),
            *("trainer.batch_size=16", "trainer.eval_samples=16", "dataset.samples=4000"),
            log=log,
        )
        assert trained.wait(PATIENCE) == 0, log.read_text()
    return newest(run_dir / "checkpoints")


def newest(root: Path) -> int:
    manifest = max(root.glob("seq-*/manifest.json")).read_text()
    step: int = json.loads(manifest)["manifest"]["step"]
    return step


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
