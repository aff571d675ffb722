"""Look at a root as programs without ranks do: verify, export, follow."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torchrec.inference.modules import quantize_inference_model
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed import references
from tests.distributed.layouts import OrderedModel, table_names
from tests.distributed.models import ModelSpec
from tests.distributed.quantized_job import set_types
from tests.distributed.quantized_oracle import HALF, equal, equal_rows, step_bound
from torchrec_checknrun import Follower, verify
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import Chain, resolve
from torchrec_checknrun.serve.publish import publish
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tools.export import export_dcp, export_safetensors
from torchrec_checknrun.tools.tables import ChunkCache, TableReader

WIDTHS = {"fp32": None, "int8": torch.qint8, "int4": torch.quint4x2, "int2": torch.quint2x4}


class Looks:
    """Followers that go on from life to life, and what else reads a root.

    Args:
        copies: the folder of restored states, as ``quantized_life`` puts them aside.
    """

    def __init__(
        self, draw: random.Random, root: Path, copies: Path, spec: ModelSpec, dtypes: dict[str, str]
    ) -> None:
        self.draw, self.root, self.copies, self.spec, self.dtypes = draw, root, copies, spec, dtypes
        dims = [t.dim for c in spec.collections for t in c.tables]
        fits = {"fp32": 1, "int8": 4, "int4": 4, "int2": 8}  # FBGEMM's rows
        forms = [f for f in sorted(WIDTHS) if all(d % fits[f] == 0 for d in dims)]
        self.forms = draw.sample(forms, 2)
        self.followers: dict[str, Follower] = {}

    def rename(self, spec: ModelSpec, dtypes: dict[str, str]) -> None:
        """Serve models with other names from now on."""
        self.spec, self.dtypes = spec, dtypes
        self.followers = {}

    def look(self, seen: Counter[str]) -> list[str]:
        problems = [f"verify {v.id}: {p}" for v in verify(self.root) for p in v.problems]
        seen["verified"] += 1
        names = sorted(p.parent.name for p in self.root.glob("*/manifest.json"))
        for name in self.draw.sample(names, min(2, len(names))):
            first = self._first(name)
            if first is not None:
                problems += [f"export {name}: {p}" for p in self._exported(name, first)]
                seen["exported"] += 1
        if len(names) > 1:
            problems += self._compared(*sorted(self.draw.sample(names, 2)))
            seen["compared"] += 1
        problems += [f"published: {p}" for p in self._published()]
        for form in self.forms:
            problems += [f"follow {form}: {p}" for p in self._follow(form, seen)]
        return problems

    def _compared(self, before: str, after: str) -> list[str]:
        """Count the changed rows of two checkpoints, and compare with their restores."""
        one, other = self._first(before), self._first(after)
        if one is None or other is None or self._names(before) != self._names(after):
            return []
        found = {t.table: t.changed_rows for t in compare(self.root, before, after).tables}
        wanted = {
            path: int((~equal_rows(one[f"w{place}"], other[f"w{place}"])).sum())
            for place, path in enumerate(self._names(after))
        }
        return [] if found == wanted else [f"diff {before} {after}: {found}, not {wanted}"]

    def _published(self) -> list[str]:
        """Publish the newest checkpoint as it is, and follow that."""
        with tempfile.TemporaryDirectory() as target:
            try:
                publish(self.root, target, bits=None)
            except CheckNRunError as error:
                return [repr(error)]
            follower = Follower(target, self._served("fp32"), copies=1)
            version = follower.poll()
            source = Follower(self.root, self._served("fp32"), copies=1)
            source.poll()
            assert version is not None
            with follower.read() as (model, _), source.read() as (other, _):
                mine, its = model.state_dict(), other.state_dict()
                return [k for k in mine if not same_bytes(mine[k], its[k])]

    def _first(self, checkpoint: str) -> dict[str, np.ndarray] | None:
        """Return the first restore of a checkpoint, or of one that it is a copy of."""
        start = "_".join(checkpoint.split("_")[:2])
        found = sorted(self.copies.glob(f"first-{start}_*.npz"))
        return references.load(found[0]) if found else None

    def _exported(self, name: str, first: dict[str, np.ndarray]) -> list[str]:
        folder = Folder(self.root)
        chain = resolve(folder, name)
        problems = []
        with tempfile.TemporaryDirectory() as target:
            done = export_dcp(folder, chain, f"{target}/dcp")
            tensors = {
                n: torch.empty(s, dtype=torch.float32)
                for n, s in done.tensors.items()
                if n.endswith(".weight") and "embedding" in n and not n.startswith("fused")
            }
            for key in tensors:
                tensors[key] = tensors[key].to(self._dtype(key, name))
            dcp.load(tensors, checkpoint_id=f"{target}/dcp", no_dist=True)
            export_safetensors(folder, chain, f"{target}/st")
            for place, path in enumerate(self._names(name)):
                wanted = first[f"w{place}"]
                other = load_file(f"{target}/st/{path}.safetensors")["weight"]
                for what, got in (("dcp", tensors[f"{path}.weight"]), ("safetensors", other)):
                    array = (got.float() if got.dtype == torch.bfloat16 else got).numpy()
                    if not equal(array, wanted):
                        problems.append(f"{what} {path}: {array.dtype}, not the restored bits")
            problems += self._fused(folder, chain, f"{target}/fused", first)
            problems += self._read(chain, first)
        return problems

    def _fused(
        self, folder: Folder, chain: Chain, target: str, first: dict[str, np.ndarray]
    ) -> list[str]:
        """Export rows as stored, and as inference has them; decode the first."""
        problems = []
        export_safetensors(folder, chain, f"{target}-inference", rows="fused", layout="inference")
        done = export_safetensors(folder, chain, target, rows="fused")
        for place, path in enumerate(self._names(chain.head.id)):
            loaded, wanted = load_file(f"{target}/{path}.safetensors"), first[f"w{place}"]
            exact = self._dtype(path, chain.head.id) == torch.float32
            if not done.tables[path].startswith("fused") or "weight" not in loaded or not exact:
                continue
            found = torch.empty(wanted.shape)
            codec = Rowwise(int(done.tables[path].split()[1]))
            codec.decode(loaded["weight"].view(-1), {}, len(found), 0, found)
            found[loaded["exceptions.rows"]] = loaded["exceptions.weight"]
            if not equal(found.numpy(), wanted):
                problems.append(f"fused {path}: not the restored bits")
        return problems

    def _read(self, chain: Chain, first: dict[str, np.ndarray]) -> list[str]:
        """Read some rows by their ids, as ``checknrun cat`` does."""
        problems = []
        content, cache = read_content(Folder(self.root), chain), ChunkCache(Folder(self.root))
        for place, path in enumerate(self._names(chain.head.id)):
            wanted = first[f"w{place}"]
            ids = sorted(self.draw.sample(range(len(wanted)), 9))
            got = TableReader(content, path, cache).rows(ids).weight
            array = (got.float() if got.dtype == torch.bfloat16 else got).numpy()
            if not equal(array, np.ascontiguousarray(wanted[ids])):
                problems.append(f"cat {path}: {ids} are not the restored rows")
        return problems

    def _dtype(self, key: str, checkpoint: str) -> torch.dtype:
        places = [self._names(checkpoint).index(key.removesuffix(".weight"))]
        (name,) = (list(self.dtypes.values())[place] for place in places)
        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]

    def _names(self, checkpoint: str) -> list[str]:
        """Return the tables of a checkpoint by place, also where they have other names now."""
        start = "_".join(checkpoint.split("_")[:2])
        note = next(self.copies.glob(f"{start}_*.json"))
        return list(json.loads(note.read_bytes())["names"])

    def _served(self, form: str) -> Any:
        model = OrderedModel(self.spec)
        set_types(
            model, self.spec, self.dtypes if form == "fp32" else dict.fromkeys(self.dtypes, "fp32")
        )
        model = model.to_empty(device="cpu").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        kind = WIDTHS[form]
        return model if kind is None else quantize_inference_model(model, quantization_dtype=kind)

    def _follower(self, form: str) -> Follower:
        """Make a follower; one whose model has other names than the newest checkpoint maps them."""
        return Follower(self.root, self._served(form), copies=self.draw.choice([1, 2]))

    def _follow(self, form: str, seen: Counter[str]) -> list[str]:
        try:
            follower = self.followers.get(form) or self._follower(form)
        except CheckNRunError as error:
            return [] if "UnsupportedTable" in type(error).__name__ else [repr(error)]
        self.followers[form] = follower
        version = follower.poll()
        if version is None:
            return []
        if version.error:
            return [version.error]
        fresh = self._follower(form)
        again = fresh.poll()
        assert again is not None
        problems = []
        first = self._first(version.checkpoint_id)
        with follower.read() as (model, _), fresh.read() as (other, _):
            mine, its = model.state_dict(), other.state_dict()
            if version.checkpoint_id.split("_")[:2] == again.checkpoint_id.split("_")[:2]:
                problems += [
                    f"{k} of {version.checkpoint_id} is not what a new follower has"
                    for k in mine
                    if "bounds_check" not in k and not same_bytes(mine[k], its[k])
                ]
            else:
                problems.append(f"{version.checkpoint_id}, a new one {again.checkpoint_id}")
            if first is not None:
                seen[f"followed {form}"] += 1
                problems += self._served_rows(form, model, first)
        return problems

    def _served_rows(self, form: str, model: Any, first: dict[str, np.ndarray]) -> list[str]:
        problems = []
        for place, (path, (_, table)) in enumerate(table_names(self.spec).items()):
            wanted = first[f"w{place}"]
            if form == "fp32":
                weight = model.state_dict()[f"{path}.weight"]
                got = (weight.float() if weight.dtype == torch.bfloat16 else weight).numpy()
                if not equal(got, wanted):
                    wrong = (got != wanted).any(axis=1).nonzero()[0]
                    problems.append(f"{path}: rows {wrong[:5]} of {len(wrong)}")
                continue
            got = looked_up(model, path, table, self.spec)
            bits = int(form[3:])
            rows = wanted.astype(np.float64)
            sound = np.isfinite(rows).all(axis=1) & (abs(rows).max(axis=1) < 6e4)
            bound = (
                step_bound(rows, bits if bits < 8 else 7, False) * 1.02
                + 2.0**-14 * (abs(rows).max(axis=1, keepdims=True)) * 17 * (bits == 8)
                + 2.0**-25 * 256
            )
            bound = bound + HALF[list(self.dtypes.values())[place]] * 2 * (
                abs(rows).max(axis=1, keepdims=True)
            )
            wrong = np.flatnonzero(~(abs(got - rows) <= bound).all(axis=1) & sound)
            if len(wrong):
                row = wrong[0]
                problems.append(
                    f"{path}: rows {wrong[:5]} of {len(wrong)}: {got[row][:5]} not {rows[row][:5]}"
                )
        return problems


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def looked_up(model: Any, path: str, table: Any, spec: ModelSpec) -> np.ndarray:
    """Look every row of a quantized table up, by one of its features."""
    collection = getattr(model, path.split(".")[0])
    features = list(
        dict.fromkeys(
            f
            for c in spec.collections
            if c.name == path.split(".")[0]
            for t in c.tables
            for f in t.features
        )
    )
    chosen = table.features[0]
    lengths = [torch.full((table.rows,), int(f == chosen)) for f in features]
    question = KeyedJaggedTensor(
        keys=features,
        values=torch.arange(table.rows),
        lengths=torch.cat(lengths).to(torch.int64),
    )
    with torch.no_grad():
        answer = collection(question)
    used = [
        f
        for c in spec.collections
        if c.name == path.split(".")[0]
        for t in c.tables
        for f in t.features
    ]
    key = f"{chosen}@{table.name}" if used.count(chosen) > 1 else chosen
    if "embedding_bags" in path:
        return answer[key].numpy().astype(np.float64)
    return answer[key].values().numpy().astype(np.float64)
