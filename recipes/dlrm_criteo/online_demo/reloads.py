"""Serve whole checkpoints: the two models that the followed one is compared with.

A whole checkpoint is read into a new fp32 model, which TorchRec quantizes; the optimizer's state is
not read. So the bytes and the seconds are the least that a reload can do.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.inference.modules import quantize_inference_model

from recipes.dlrm_criteo.model import Architecture
from recipes.dlrm_criteo.online_demo.served import Answer
from recipes.dlrm_criteo.reader import to_batch
from recipes.dlrm_criteo.samples import Samples
from torchrec_checknrun import Follower

_POLL_SECONDS = 0.1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Whole:
    """A model made from one checkpoint.

    Attributes:
        shown: when it was ready, by the clock of ``time.time``.
        seconds: from the look that found the checkpoint until then.
    """

    model: nn.Module
    id: str
    step: int
    bytes_read: int
    shown: float
    seconds: float

    def predict(self, samples: Samples) -> Answer:
        """Return the probabilities of clicks."""
        batch = to_batch(samples, CPU)
        with torch.no_grad():
            logits: Any = self.model(batch.dense_features, batch.sparse_features)
        return Answer(logits.reshape(-1).sigmoid().double().numpy(), self.id, self.step)


def inference_model(architecture: Architecture) -> nn.Module:
    """Build the job's model without its loss, unsharded, with no values yet."""
    model: nn.Module = architecture.build(CPU).model
    model.get_submodule("sparse_arch").to_empty(device=CPU)
    return model.eval()


def load_newest(root: Path, architecture: Architecture) -> Whole | None:
    """Read the newest whole checkpoint of a root, and quantize it; None if there is none."""
    began = time.perf_counter()
    follower = Follower(root, inference_model(architecture), copies=1)
    version = follower.poll()
    if version is None:
        return None
    with follower.read() as (model, _):
        quantized = quantize_inference_model(model, quantization_dtype=torch.qint8)
    return Whole(
        quantized,
        version.checkpoint_id,
        version.step,
        version.bytes_read,
        shown=time.time(),
        seconds=time.perf_counter() - began,
    )


class Reloads:
    """A thread that reloads the model whenever a checkpoint is committed.

    Attributes:
        loaded: every version so far, oldest first.
        error: what ended the thread; None while it is well.
    """

    def __init__(self, root: Path, architecture: Architecture) -> None:
        self._root, self._architecture = root, architecture
        self.loaded: list[Whole] = []
        self.error: Exception | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reloads", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Whole:
        return self.loaded[-1]

    def close(self) -> None:
        """End the thread; the models stay."""
        self._ends.set()
        self._thread.join(60)

    def _run(self) -> None:
        known: set[str] = set()
        try:
            while not self._ends.wait(_POLL_SECONDS):
                committed = {path.parent.name for path in self._root.glob("seq-*/manifest.json")}
                if committed <= known:
                    continue
                whole = load_newest(self._root, self._architecture)
                known |= committed
                if whole is not None and whole.id not in {each.id for each in self.loaded}:
                    self.loaded.append(whole)
        except Exception as error:
            self.error = error
