"""Keep copies of states in files, and compare restored states with them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import torch

from tests.distributed.states import State
from torchrec_checknrun.delta.log_levels import codes_of, values_of
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder

STEP = 2.0**-18
"""The step of rows stored as differences; one without an update differs by far more."""


LEVEL = 2.0**0.125 - 1
"""Bounds the relative error of optimizer state on levels an eighth of an octave apart."""


def store(path: Path, state: State) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, value in state.items():
            with file.open(f"{name.replace('/', '|')}.npy", "w") as member:
                np.lib.format.write_array(member, value)


def load(path: Path) -> State:
    with np.load(path) as file:
        return {name.replace("|", "/"): file[name] for name in file.files}


def narrowest_bits(root: Path, checkpoint: str) -> int | None:
    """Return the fewest bits in the chain that ends at a checkpoint; None if all is exact."""
    bits = []
    link: dict[str, str] | None = {"id": checkpoint}
    while link is not None:
        manifest = json.loads((root / link["id"] / "manifest.json").read_bytes())["manifest"]
        bits += [manifest["bits"]] if manifest["bits"] is not None else []
        link = manifest["parent"]
    return min(bits, default=None)


def links_of(root: Path, checkpoint: str) -> str:
    """Return the method by which a checkpoint's tables are stored as differences; empty: none."""
    manifest = json.loads((root / checkpoint / "manifest.json").read_bytes())["manifest"]
    if "deltas" not in manifest:
        return ""
    tables = (manifest["tables"][name] for name in manifest["deltas"])
    methods = {str(codec["name"]) for table in tables for codec in table["codecs"]}
    if not methods:  # a link without rows
        return links_of(root, manifest["parent"]["id"])
    (method,) = methods
    return method


def has_log_state(root: Path, checkpoint: str) -> bool:
    """Tell whether optimizer state of a checkpoint is stored as logarithmic differences."""
    folder = Folder(root)
    entries = (chunk.entry for chunk in read_indexes(folder, read_manifest(folder, checkpoint)))
    states = (s for e in entries if isinstance(e, RowsEntry) for s in e.optimizer)
    return any(state.encoding["scheme"] == "logdelta" for state in states)


def linked_bound(name: str, wanted: State) -> np.ndarray:
    """Bound the error of a table's rows that are stored as whole numbers of steps, as ``(n, 1)``.

    The bound is half a step, the power of two next to ``STEP / sqrt(G)``, and the rounding to fp32;
    rows without a gradient so far are exact.
    """
    path = name.removeprefix("model/").removesuffix(".weight")
    sums = wanted.get(f"optimizer/state/{path}.weight/{path.rpartition('.')[2]}.momentum1")
    rows = wanted[name].astype(np.float64)
    rounding = 2.0**-24 * abs(rows).max(axis=1, keepdims=True)
    if sums is None:
        return np.asarray(STEP / 2 + rounding)
    mean = sums.astype(np.float64).reshape(len(rows), -1).mean(axis=1, keepdims=True)
    steps = STEP * 2**0.5 / np.sqrt(np.where(mean > 0, mean, 1.0))
    return np.where(mean > 0, steps / 2 * (1 + 2.0**-10) + rounding, 0.0)


def error_bound(rows: np.ndarray, bits: int) -> np.ndarray:
    """Bound the error of ``(n, dim)`` values in FBGEMM's rowwise formats, as ``(n, 1)``.

    The bound is half a step, and the rounding of scale and bias: fp32 (and 1e-8 in a divisor) at
    8 bit, fp16 at 4 and 2 bit, where the last code is wrong by the scale's rounding as often as
    there are codes.
    """
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    largest, spread = np.maximum(abs(low), abs(high)), high - low
    codes = 2**bits - 1
    if bits == 8:
        rounding = 2.0**-22 * largest + 1e-8
    else:
        rounding = 2.0**-11 * (abs(low) + spread * 1.01) + 2.0**-25 * (codes + 1)
    return np.asarray(spread / codes / 2 * (1 + 2.0**-10) + rounding)


def differences(
    found: State,
    wanted: State,
    bits: int | None,
    linked: bool = False,
    log_state: bool = False,
) -> list[str]:
    """Describe every difference; rows may be off by the bound of ``bits``, or of links, and sums of
    squared gradients by that of logarithms.
    """
    problems = [f"only in one of them: {name}" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        a, b = found[name], wanted[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{name}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif ".embedding" in name and name.startswith("model/") and linked:
            worse = abs(a.astype(np.float64) - b) > linked_bound(name, wanted)
            if worse.any():
                problems.append(f"{name}: rows {np.flatnonzero(worse.any(axis=1))} differ by steps")
        elif ".embedding" in name and name.startswith("model/") and bits is not None:
            worse = abs(a.astype(np.float64) - b) > error_bound(b.astype(np.float64), bits)
            if worse.any():
                problems.append(
                    f"{name}: rows {np.flatnonzero(worse.any(axis=1))} beyond {bits} bits"
                )
        elif log_state and name.startswith("optimizer/") and name.endswith(".momentum1"):
            levels = values_of(codes_of(torch.from_numpy(b))).numpy()
            worse = (a != levels) | (abs(a.astype(np.float64) - b) > LEVEL * abs(b))
            if worse.any():
                problems.append(f"{name}: rows {np.flatnonzero(worse)} differ by levels")
        elif a.tobytes() != b.tobytes():
            rows = np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1)) if a.ndim else [0]
            problems.append(f"{name}: rows {list(rows)} differ")
    return problems
