"""Keep copies of states in files, and compare restored states with them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from tests.distributed.states import State


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


def differences(found: State, wanted: State, bits: int | None) -> list[str]:
    """Describe every difference; embedding rows may be off by the bound of ``bits``."""
    problems = [f"only in one of them: {name}" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        a, b = found[name], wanted[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{name}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif ".embedding" in name and name.startswith("model/") and bits is not None:
            worse = abs(a.astype(np.float64) - b) > error_bound(b.astype(np.float64), bits)
            if worse.any():
                problems.append(
                    f"{name}: rows {np.flatnonzero(worse.any(axis=1))} beyond {bits} bits"
                )
        elif a.tobytes() != b.tobytes():
            rows = np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1)) if a.ndim else [0]
            problems.append(f"{name}: rows {list(rows)} differ")
    return problems
