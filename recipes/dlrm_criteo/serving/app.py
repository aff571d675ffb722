"""Answer requests: predictions of one version each, the version, metrics, and a page to watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from recipes.dlrm_criteo.reader import to_batch
from recipes.dlrm_criteo.serving.metrics import Metrics
from recipes.dlrm_criteo.serving.question import BadQuestion, Question, read
from torchrec_checknrun import Follower

PAGE = Path(__file__).with_name("page.html")
BYTES_PER_SAMPLE = 2048
"""Room of a sample in a request: 39 numbers of 25 characters take half of it."""
_CPU = torch.device("cpu")
_SCHEMA = {"content": {"application/json": {"schema": Question.model_json_schema()}}}


class Predictions:
    """The model behind the server.

    Args:
        rows: of each feature's table.
        most: samples of a request.
    """

    def __init__(
        self, follower: Follower, metrics: Metrics, rows: Sequence[int], most: int
    ) -> None:
        self.follower = follower
        self.metrics = metrics
        self.most_bytes = most * BYTES_PER_SAMPLE
        self._rows = rows
        self._most = most

    def answer(self, body: bytes) -> dict[str, Any]:
        """Return the probabilities of clicks, and the version that all of them are of.

        Raises:
            BadQuestion: the request is no question, see ``question.read``.
            HTTPException: 503, nothing is served yet.
        """
        samples = read(body, self._rows, self._most)
        batch = to_batch(samples, _CPU)
        # TorchScript would spend the first two predictions of each copy on optimizing it.
        plainly = torch.jit.optimized_execution(False)
        with self.follower.read() as (model, version), torch.inference_mode(), plainly:
            if version is None:
                raise self.nothing_yet()
            logits = model(batch.dense_features, batch.sparse_features)
            found = logits.reshape(-1).double().sigmoid().tolist()
        self.metrics.samples.inc(len(found))
        return {
            "predictions": found,
            "version": {"id": version.checkpoint_id, "step": version.step},
        }

    def nothing_yet(self) -> HTTPException:
        """Say why there is no version, and what to do."""
        error = self.follower.error
        reason = "nothing is published in the root yet" if error is None else error
        return HTTPException(503, f"no version is served yet, ask again later: {reason}")


def make_app(predictions: Predictions, pool: ThreadPoolExecutor) -> FastAPI:
    """Make the application.

    Args:
        pool: where predictions run, so that the event loop never waits for the model.
    """
    app = FastAPI(title="A DLRM that follows its training")
    metrics, follower = predictions.metrics, predictions.follower

    @app.post("/predict", openapi_extra={"requestBody": _SCHEMA})
    async def predict(request: Request) -> Response:
        body = await _body(request, predictions.most_bytes)
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        with follower.serving():
            found = await loop.run_in_executor(pool, predictions.answer, body)
            answer = JSONResponse(found)
        metrics.seconds.observe(time.perf_counter() - began)
        return answer

    @app.get("/version")
    async def version() -> dict[str, Any]:
        served = follower.version
        if served is None:
            raise predictions.nothing_yet()
        found = asdict(served)
        return {"id": found.pop("checkpoint_id"), **found}

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE)

    @app.exception_handler(BadQuestion)
    async def refused(request: Request, error: BadQuestion) -> Response:
        metrics.refused.labels("422").inc()
        errors = [{"field": field, "message": message} for field, message in error.errors]
        return JSONResponse({"detail": errors}, 422)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        metrics.refused.labels(str(error.status_code)).inc()
        return JSONResponse({"detail": error.detail}, error.status_code)

    return app


async def _body(request: Request, most: int) -> bytes:
    """Receive a request, as far as it may be long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"the request has more than {most} bytes; send fewer samples")
        parts.append(part)
    return b"".join(parts)
