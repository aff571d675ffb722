"""Say what a model in any layout should hold and train to, unsharded and without the package.

``whole_state`` puts a model together from TorchRec's own state dicts; ``Reference`` trains the same
global batches as a ``LayoutJob``, in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.layouts import (
    EPS,
    LEARNING_RATE,
    Layout,
    LayoutJob,
    global_batch,
    table_names,
)
from tests.distributed.models import ModelSpec
from tests.distributed.states import gather


@dataclass
class Whole:
    """A model's state, unsharded.

    Attributes:
        weights: ``(rows, dim)`` by table.
        states: optimizer state by table, ``(rows, dim)``: a row-wise value stands in every column
            that it is for. Empty if the optimizer has none.
        rest: everything that isn't of a table.
    """

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    rest: dict[str, np.ndarray] = field(default_factory=dict)

    def store(self, path: str | Path) -> None:
        parts = {"weights": self.weights, "states": self.states, "rest": self.rest}
        arrays: dict[str, Any] = {
            f"{part}:{key}".replace("/", "|"): value
            for part, values in parts.items()
            for key, value in values.items()
        }
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Whole:
        whole = cls()
        with np.load(path) as file:
            for name in file.files:
                part, _, key = name.replace("|", "/").partition(":")
                getattr(whole, part)[key] = file[name]
        return whole

    def copy(self) -> Whole:
        return Whole(*({k: v.copy() for k, v in p.items()} for p in vars(self).values()))


def whole_state(job: LayoutJob, layout: dict[str, Any]) -> Whole:
    """Put the state together from TorchRec's state dicts, on every rank; call it on all ranks."""
    where = Layout.from_json(layout)
    state = gather(job)
    whole = Whole()
    for path, (name, table) in table_names(job.spec).items():
        whole.weights[path] = state.pop(f"model/{path}.weight")
        for key in [key for key in state if f"{path}.weight/" in key]:
            value = state.pop(key)
            if key.endswith("/step"):
                continue  # of a data-parallel table's dense optimizer
            assert key.rsplit("/", 1)[-1] in (f"{table.name}.momentum1", "sum"), key
            if value.ndim == 1:
                widths = where.widths(name, table.dim)
                parts = value.reshape(len(widths), table.rows)
                value = np.repeat(parts, widths, axis=0).T
            whole.states[path] = np.broadcast_to(value, (table.rows, table.dim)).copy()
    whole.rest = state
    return whole


def expected(
    whole: Whole, spec: ModelSpec, source: Layout, target: Layout, *, pointwise: bool
) -> tuple[Whole, set[str]]:
    """Return the required state after a restore, and the tables whose state is converted."""
    wanted, converted = whole.copy(), set()
    for path, (name, table) in table_names(spec).items():
        widths = target.widths(name, table.dim)
        if path not in whole.states or pointwise or widths == source.widths(name, table.dim):
            continue
        converted.add(path)
        blocks = np.split(whole.states[path].astype(np.float64), np.cumsum(widths)[:-1], axis=1)
        means = [block.mean(axis=1, keepdims=True).repeat(block.shape[1], 1) for block in blocks]
        wanted.states[path] = np.concatenate(means, axis=1).astype(np.float32)
    return wanted, converted


def differences(found: Whole, wanted: Whole, converted: set[str], exact: bool = True) -> list[str]:
    """Describe all differences; converted state (or all, if not ``exact``) has a tolerance."""
    problems = []
    for part in ("weights", "states", "rest"):
        a, b = getattr(found, part), getattr(wanted, part)
        problems += [f"only in one of them: {part} {name}" for name in a.keys() ^ b.keys()]
        for name in sorted(a.keys() & b.keys()):
            if a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
                problems.append(f"{part} {name}: {a[name].dtype}{a[name].shape}")
                continue
            if exact and not (part == "states" and name in converted):
                equal = a[name].tobytes() == b[name].tobytes()
            else:
                rtol, atol = (3e-7, 0.0) if exact else (1e-6, 1e-6)
                equal = np.allclose(a[name], b[name], rtol=rtol, atol=atol)
            if not equal:
                error = abs(a[name].astype(np.float64) - b[name]).max()
                problems.append(f"{part} {name}: off by {error:.3g}")
    return problems


class Reference:
    """The same model in plain PyTorch, unsharded, all samples in one process."""

    def __init__(self, spec: ModelSpec, whole: Whole, layout: Layout, data_seed: int = 0) -> None:
        self._spec, self._layout, self._data_seed = spec, layout, data_seed
        self.whole = whole.copy()

    def train(self, first: int, steps: int) -> None:
        """Train those batches; apply row-wise Adagrad per column shard of the layout."""
        for step in range(first, first + steps):
            tables = {
                k: torch.from_numpy(v).requires_grad_() for k, v in self.whole.weights.items()
            }
            dense = {
                k: torch.from_numpy(v).requires_grad_()
                for k, v in self.whole.rest.items()
                if k.startswith("model/")
            }
            self._loss(tables, dense, step).backward()
            with torch.no_grad():
                for path, (name, table) in table_names(self._spec).items():
                    self._update_table(tables[path], path, self._layout.widths(name, table.dim))
                for name, parameter in dense.items():
                    self._update_dense(parameter, name.removeprefix("model/"))

    def _loss(
        self, tables: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        inputs, features = global_batch(self._spec, self._data_seed, step)
        parts = [inputs]
        paths = iter(self._spec.table_paths)
        for collection in self._spec.collections:
            pooled = [
                torch.stack([tables[path][ids].sum(dim=0) for ids in features[feature]])
                for table, path in zip(collection.tables, paths, strict=False)
                for feature in table.features
            ]
            parts.append(torch.cat(pooled, dim=1) if collection.bag else torch.stack(pooled).sum(0))
        hidden = torch.tanh(
            torch.cat(parts, dim=1) @ dense["model/hidden.weight"].T + dense["model/hidden.bias"]
        )
        out = (hidden @ dense["model/out.weight"].T + dense["model/out.bias"]).squeeze(1)
        return (out - inputs.sum(dim=1)).square().mean()

    def _update_table(self, weight: torch.Tensor, path: str, widths: list[int]) -> None:
        gradient = weight.grad
        assert gradient is not None
        if self._spec.fused == "sgd":
            weight -= LEARNING_RATE * gradient
            return
        state = torch.from_numpy(self.whole.states[path])
        if self._spec.fused == "adagrad":
            state += gradient.square()
        else:
            for part, of_part in zip(
                state.split(widths, dim=1), gradient.split(widths, dim=1), strict=True
            ):
                part += of_part.square().mean(dim=1, keepdim=True)
        weight -= LEARNING_RATE * gradient / (state.sqrt() + EPS)

    def _update_dense(self, parameter: torch.Tensor, name: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._spec.dense == "sgd":
            parameter -= LEARNING_RATE * gradient
            return
        state = torch.from_numpy(self.whole.rest[f"optimizer/state/dense.{name}/sum"])
        state += gradient.square()
        self.whole.rest[f"optimizer/state/dense.{name}/step"] += 1
        parameter -= LEARNING_RATE * gradient / (state.sqrt() + EPS)
