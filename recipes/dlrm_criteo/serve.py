r"""Serve the main job's model over HTTP, always at the newest state that a root holds.

    python -m recipes.dlrm_criteo.serve root=/checkpoints/serve-18 bits=4 port=8080

`configs/serve.yaml` lists everything that can be set. `/predict` takes
`{"dense": [[13 numbers], ...], "ids": [[26 integers], ...]}`, see `serving/question.py`.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import torch
import uvicorn
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torchrec.inference.modules import quantize_inference_model

from recipes.dlrm_criteo.model import Architecture
from recipes.dlrm_criteo.serving.app import Predictions, make_app
from recipes.dlrm_criteo.serving.metrics import Metrics
from recipes.dlrm_criteo.serving.script import script
from torchrec_checknrun import Follower

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WIDTHS = {8: torch.qint8, 4: torch.quint4x2, 2: torch.quint2x4}
GRACE_SECONDS = 10
"""Seconds for answers that are on their way when the server is told to end."""
SWITCH_SECONDS = 0.0005
"""The longest that a prediction waits for Python's lock while another thread runs Python, such as
the follower's; 5 ms by default, which is as long as several predictions."""
_CPU = torch.device("cpu")
logger = logging.getLogger("recipes.dlrm_criteo.serve")  # __name__ is __main__ here


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="serve")
def main(cfg: DictConfig) -> None:
    """Serve until SIGTERM or SIGINT, which is a success."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if cfg.bits not in (32, *WIDTHS):
        sys.exit(f"bits is {cfg.bits}; choose 32, 8, 4 or 2")
    if cfg.threads < 1 or cfg.most_samples < 1 or not cfg.interval_seconds > 0:
        sys.exit("threads, most_samples and interval_seconds have to be above zero")
    if not 0 < cfg.share <= 1:
        sys.exit(f"share is {cfg.share}; choose a part of a core, above 0 and at most 1")
    listening = _listen(cfg.host, cfg.port)
    torch.set_num_threads(1)  # requests run beside each other
    sys.setswitchinterval(SWITCH_SECONDS)
    architecture: Architecture = instantiate(cfg.model)
    metrics = Metrics()
    follower = Follower(
        cfg.root,
        script(inference_model(architecture, cfg.bits)),
        interval_seconds=cfg.interval_seconds,
        share=cfg.share,
        on_version=metrics.shown,
    )
    metrics.watch(follower)
    rows = architecture.num_embeddings_per_feature
    predictions = Predictions(follower, metrics, rows, cfg.most_samples)
    with follower, ThreadPoolExecutor(cfg.threads, "predictions") as pool:
        host, port = listening.getsockname()[:2]
        gc.collect()
        gc.freeze()  # else a collection looks at all of torch, and everything waits meanwhile
        print(f"serving {cfg.root} on http://{host}:{port}", flush=True)
        config = uvicorn.Config(
            make_app(predictions, pool),
            log_level="warning",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[listening])


def inference_model(architecture: Architecture, bits: int) -> nn.Module:
    """Build the job's model without its loss, unsharded, with no values yet.

    Args:
        bits: of a table's values.
    """
    model: nn.Module = architecture.build(_CPU).model
    model.get_submodule("sparse_arch").to_empty(device=_CPU)
    model.eval()
    if bits == 32:
        return model
    quantized: nn.Module = quantize_inference_model(model, quantization_dtype=WIDTHS[bits])
    return quantized


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything that takes long."""
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        sys.exit(f"host={host} port={port} can't be listened on ({error}); choose another port=…")
    # Inherited by connections. Without it a client's delayed acknowledgement holds an answer's body
    # back for 40 ms; asyncio sets it only where a socket names TCP, which create_server's doesn't.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
