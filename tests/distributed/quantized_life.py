"""Run one life of a job whose rows are stored in few bits, in the workers of quantized sequences.

Every cut and every first restore is put aside by rank 0, as global arrays that TorchRec's own
state dicts give.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.layouts import Layout, table_names
from tests.distributed.models import ModelSpec, TableSpec
from tests.distributed.quantized_job import arrays_of, build
from tests.distributed.quantized_oracle import equal_rows, problems_of, same
from tests.distributed.sequence_sabotage import LOSES_ROWS
from tests.distributed.states import State
from torchrec_checknrun import Checkpointer, Quantization, Retention, compact, load_tables
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.errors import CheckpointNotFound


def quantization(document: Any) -> Any:
    if isinstance(document, dict):
        tables = {p: quantization(q) for p, q in document.get("tables", {}).items()}
        return Quantization(**{**document, "tables": tables})
    return document


class Living:
    """A job with its checkpointer, and what is done to them.

    Args:
        where: ``root``, ``copies`` (a folder), ``spec``, ``layout``, ``dtypes``.
        life: options of the Checkpointer, as JSON.
    """

    def __init__(self, where: dict[str, Any], life: dict[str, Any], seed: int) -> None:
        self.where = where
        self.root, self.copies = Path(where["root"]), Path(where["copies"])
        self.layout = Layout.from_json(where["layout"])
        spec = ModelSpec.from_json(where["spec"])
        self.job = build(spec, self.layout, where["dtypes"], seed)
        self.quantization = quantization(life.get("quantization"))
        options = {k: v for k, v in life.items() if k not in ("quantization", "retention", "map")}
        keep = life.get("retention")
        self.saver = Checkpointer(
            self.root,
            model=self.job.model,
            state={"optimizer": self.job.optimizer, "job": self.job},
            quantization=self.quantization,
            retention=None if keep is None else Retention(keep),
            timeout_seconds=120,
            **options,
        )
        self.map = life.get("map")
        # Then rows of the restored differentials are encoded again with the next one.
        self.anew = life.get("policy") != "consecutive"
        self.base: str | None = None
        self.rebased = True
        self.restored: State = {}
        self.touched: State = {}
        self.done: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.counts = {"rows": 0, "restores": 0}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.job.train()
            self.saver.step()

    def write(self, seed: int, share: float, kind: str) -> None:
        """Write rows by hand: values follow from table, row, column and ``seed``."""
        for place, (path, (_, table)) in enumerate(table_names(self.job.spec).items()):
            draw = np.random.default_rng([seed, place])
            ids = np.flatnonzero(draw.random(table.rows) < share)
            weight = values(draw, len(ids), table.dim, kind)
            states = draw.random((6, len(ids), table.dim)).astype(np.float32) * 3
            for shard in self.saver._target.tracked.shards:
                r = shard.rectangle
                if shard.local.table != path:
                    continue
                own = (ids >= r.row_start) & (ids < r.row_stop)
                cols = slice(r.col_start, r.col_stop)
                optimizer = {}
                for number, (name, state) in enumerate(shard.local.optimizer.items()):
                    of_state = states[number][own]
                    part = of_state[:, r.col_start] if state.dim() == 1 else of_state[:, cols]
                    optimizer[name] = torch.from_numpy(np.ascontiguousarray(part)).to(state.dtype)
                shard.write_rows(
                    torch.from_numpy(ids[own]),
                    torch.from_numpy(weight[own][:, cols].copy()).to(shard.local.weight.dtype),
                    optimizer,
                )
        self.saver.step()

    def save(self) -> None:
        state = arrays_of(self.job, self.layout)
        self._put_aside(state, self.saver.save())

    def save_behind(self, meanwhile: int) -> None:
        """Save, and train or write nothing else, while it is written."""
        state = arrays_of(self.job, self.layout)
        self.saver.save(wait=False)
        self.job.train(meanwhile)
        report = self.saver.wait()
        if report is not None:  # else nothing had changed
            self._put_aside(state, report)
        for _ in range(meanwhile):
            self.saver.step()

    def restore(self, checkpoint: str | None) -> None:
        report = self.saver.restore(checkpoint, map=self.map)
        assert report is not None, "nothing restored"
        state = arrays_of(self.job, self.layout)
        self.problems += self.compare(report.id, state)
        self.base, self.rebased = f"restored-{report.id}-{len(os.listdir(self.copies))}", False
        self.restored, self.touched = state, {}
        dist.barrier()

    def restore_nth(self, number: int) -> None:
        """Restore one of this life's checkpoints that are still there."""
        names = [d["id"] for d in self.done if (self.root / d["id"] / "manifest.json").exists()]
        dist.barrier()
        if not names:
            return
        name = names[number % len(names)]
        try:
            self.restore(name)
        except CheckpointNotFound:  # retention runs behind the last save
            assert not (self.root / name / "manifest.json").exists()
            return
        self.rebased = True  # rows modified before count as modified still

    def compact(self) -> None:
        if dist.get_rank() == 0:
            compact(str(self.root))
        dist.barrier()

    def warm(self) -> None:
        """Load some tables from the newest checkpoint of this run, over others."""
        self.write(999, 1.0, "plain")
        paths = list(table_names(self.job.spec))
        chosen = [p for i, p in enumerate(paths) if i % 2 == 0]
        optimizer = (
            self.job.spec.fused != "sgd" and "data_parallel" not in self.layout.plan.values()
        )
        found = load_tables(
            self.root, self.job.model, chosen, optimizer=optimizer, map=self.warm_map(chosen)
        )
        state = arrays_of(self.job, self.layout)
        places = {f"w{i}" for i, _ in enumerate(paths) if i % 2 == 0}
        part = {k: v for k, v in state.items() if k in places}
        self.problems += [f"warm: {p}" for p in self.compare(found.chain.head.id, part, True)]

    def warm_map(self, chosen: list[str]) -> dict[str, str] | None:
        names = {old: new for old, new in (self.map or {}).items() if new in chosen}
        return names or None

    def compare(self, checkpoint: str, state: State, weights: bool = False) -> list[str]:
        """Compare a restored state with its cut, and with earlier restores of it."""
        self.counts["restores"] += 1
        found: list[str] = []
        if dist.get_rank() == 0:
            meta = self._meta(checkpoint) | ({"only_weights": True} if weights else {})
            found, rows = problems_of(self.copies, meta, state, self.layout, self.job.spec)
            self.counts["rows"] += rows
            found += same(self.copies, meta, state, self.layout, self.job.spec)
        return [f"{checkpoint}: {p}" for p in found]

    def _meta(self, checkpoint: str) -> dict[str, Any]:
        """Return what was noted of a checkpoint, or of the one that it is a copy of."""
        path = self.copies / f"{checkpoint}.json"
        if not path.exists():
            name = next(
                p.stem
                for p in self.copies.glob("*.json")
                if p.stem.split("_")[:2] == checkpoint.split("_")[:2]
            )
            path = self.copies / f"{name}.json"
        return dict(json.loads(path.read_bytes()))

    def _note_touched(self, state: State) -> None:
        """Note which rows differ, at any cut, from what the last restore gave."""
        for place in range(len(self._tables)) if self.base is not None else ():
            own = [k for k in self.restored if k == f"w{place}" or k.startswith(f"s{place}.")]
            same_rows = [equal_rows(state[k], self.restored[k]) for k in own]
            now = ~np.logical_and.reduce(same_rows)
            self.touched[f"w{place}"] = self.touched.get(f"w{place}", False) | now

    @property
    def _tables(self) -> list[tuple[str, TableSpec]]:
        return list(table_names(self.job.spec).values())

    def _bits(self, checkpoint: str) -> list[int | None]:
        """Return the fewest bits of each table's rows, by the manifest; None without rows."""
        document = json.loads((self.root / checkpoint / "manifest.json").read_bytes())
        tables = document["manifest"]["tables"]
        of = [tables[name]["codecs"] for name in table_names(self.job.spec)]
        return [min((c["bits"] for c in codecs if "bits" in c), default=None) for codecs in of]

    def _put_aside(self, state: State, report: Any) -> None:
        if report.kind == "full":
            self.rebased = True
        meta = {
            "id": report.id,
            "step": report.step,
            "kind": report.kind,
            "base": self.base,
            "rebased": self.rebased or self.anew,
            "quantization": self.where["quantization"],
            "names": list(table_names(self.job.spec)),
            "widths": [self.layout.widths(n, t.dim) for n, t in self._tables],
            "replicated": [self.layout.plan[n] == "data_parallel" for n, _ in self._tables],
            "dtypes": [self.where["dtypes"][n] for n, _ in self._tables],
            "bits": self._bits(report.id),
        }
        self.done.append(meta)
        if dist.get_rank() == 0:
            self._note_touched(state)
            references.store(self.copies / f"{report.id}.touched", self.touched)
            references.store(self.copies / f"{report.id}.npz", state)
            (self.copies / f"{report.id}.json").write_text(json.dumps(meta))
        dist.barrier()


def values(draw: np.random.Generator, rows: int, dim: int, kind: str) -> np.ndarray:
    """Draw rows that are unlike each other; some of an odd kind."""
    scale = 10.0 ** draw.uniform(-2, 0.5, (rows, 1))
    found = (draw.normal(size=(rows, dim)) + draw.normal(size=(rows, 1))) * scale
    if kind == "tiny":
        found *= 1e-6
    if kind == "odd":
        of = draw.integers(0, 9, rows)
        found[of == 0] = draw.normal(size=((of == 0).sum(), 1))  # constant
        found[of == 1] *= 1e-7
        found[of == 2, 0] *= 1000
        found[of == 3] = 0
        found[of == 4, -1] = draw.choice([np.nan, np.inf, -np.inf], (of == 4).sum())
        found[of == 5] *= 3e4 / np.maximum(1, abs(found[of == 5]).max(axis=1, keepdims=True))
        found[of == 6] *= 1e-38
    return found.astype(np.float32)


def _of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Decode each row of a chunk as the one before it."""
    decode = Rowwise.decode

    def decode_and_roll(codec: Rowwise, *arguments: Any) -> None:
        decode(codec, *arguments)
        arguments[-1].copy_(arguments[-1].roll(1, 0))

    patch.setattr(Rowwise, "scatter", lambda *_: False)
    patch.setattr(Rowwise, "decode", decode_and_roll)


SABOTAGE = {
    "rows of a neighbour": _of_a_neighbour,
    "rows of an earlier time": LOSES_ROWS["marks since the baseline are lost"],
}


def live(
    where: dict[str, Any],
    life: dict[str, Any],
    script: list[list[Any]],
    seed: int,
    sabotage: str | None = None,
) -> dict[str, Any]:
    """Go through a script of ``Living``'s methods; return what was saved, and what is wrong."""
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        if sabotage is not None:
            SABOTAGE[sabotage](patch)
        living = Living(where | {"quantization": life.get("quantization")}, life, seed)
        with living.saver:
            for name, *arguments in script:
                dist.barrier()
                getattr(living, name)(*arguments)
    return {"done": living.done, "problems": living.problems, "counts": living.counts}
