"""Say what a restore of rows in few bits may differ by from the rows at their cut.

A row that was not modified since the last restore has the same bits as that gave; another one is
within its codec's documented bound. Nothing here reads a checkpoint.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed import references
from tests.distributed.layouts import Layout, table_names
from tests.distributed.models import ModelSpec
from tests.distributed.states import State

HALF = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
L2 = ("adaptive", "greedy", "importance", "kmeans")
"""Methods whose bound is one of a row's l2 error."""
SCHEMES = {"bf16": 2.0**-7, "log8": 0.1, "rowlog8": 0.06, "logdelta": 0.1}


def choice_of(document: Any, table: str, rows: int) -> dict[str, Any]:
    """Return the choice for a table, of a quantization's JSON."""
    whole = document if isinstance(document, dict) else {"bits": document}
    for pattern, choice in whole.get("tables", {}).items():
        if fnmatchcase(table, pattern):
            return dict(choice)
    if rows < whole.get("exact_below_rows", 1000):
        return {"bits": None, "optimizer": whole.get("optimizer", "fp32")}
    return whole


def is_rowwise(fused: str, state: str) -> bool:
    return (fused == "rowwise_adagrad" and state == "momentum1") or (
        fused.startswith("partial") and state == "momentum2"
    )


def step_bound(rows: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """Bound the error of each value, for one part of the columns; ``(n, 1)``."""
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    if symmetric:
        high = np.maximum(abs(low), abs(high))
        low = -high
    largest, spread = np.maximum(abs(low), abs(high)), high - low
    codes = 2**bits - 1
    if bits == 8:
        rounding = 2.0**-21 * largest + 1e-8 * 255
    else:
        rounding = 2.0**-11 * (abs(low) + spread * 1.01) + 2.0**-25 * (codes + 1)
    return np.asarray(spread / codes / 2 * (1 + 2.0**-9) + rounding)


def weight_bound(
    rows: np.ndarray, sums: np.ndarray | None, choice: dict[str, Any], bits: int | None
) -> np.ndarray | None:
    """Bound each value's error, ``(n, 1)``, or a row's l2 error; None: no bound is promised."""
    method = choice.get("method", "adaptive")
    if method in ("fp16", "bf16"):
        return HALF[method] * abs(rows).max(axis=1, keepdims=True) * 1.001 + 2.0**-25
    if method in ("delta", "fisher"):
        step = choice.get("step")
        if step is None:
            return None
        rounding = 2.0**-23 * abs(rows).max(axis=1, keepdims=True)
        if sums is None:
            return step * 2**0.5 / 2 + rounding
        mean = sums.astype(np.float64).mean(axis=1, keepdims=True)
        return np.where(
            mean > 0, step * 2**0.5 / np.sqrt(np.where(mean > 0, mean, 1)) / 2 * 1.01 + rounding, 0
        )
    if method == "lc":
        return None
    if method == "importance":
        bits = 2
    if choice.get("bits") is None and method != "importance":
        return np.zeros((len(rows), 1))
    assert isinstance(bits, int)
    return step_bound(rows, bits, method == "symmetric")


def problems_of(
    copies: Path, meta: dict[str, Any], found: State, layout: Layout, spec: ModelSpec
) -> tuple[list[str], int]:
    """Compare a restored state with its cut; return what is wrong, and the number of rows."""
    live = references.load(copies / f"{meta['id']}.npz")
    touched = references.load(copies / f"{meta['id']}.touched")
    problems, rows = [], 0
    for place, (path, (name, table)) in enumerate(table_names(spec).items()):
        key = f"w{place}"
        if key not in found:
            continue
        states = {k.split(".")[1]: v for k, v in live.items() if k.startswith(f"s{place}.")}
        rows += table.rows
        kept = np.zeros(table.rows, bool)
        if key in touched and not meta["rebased"]:
            kept = ~touched[key]
        choice = choice_of(meta["quantization"], meta["names"][place], table.rows)
        came_widths, went = meta["widths"][place], layout.widths(name, table.dim)
        bits = choice.get("bits")
        if bits == "auto":
            bits = meta["bits"][place] or 2
        sums = None if spec.fused == "sgd" else states.get("momentum2", states.get("momentum1"))
        half = HALF[meta["dtypes"][place]]
        wrong = wrong_rows(found[key], live[key], sums, choice, bits, kept, came_widths, half)
        if wrong.any():
            some = np.flatnonzero(wrong)
            problems.append(
                f"{path} {choice} {table.rows}x{table.dim}: {len(some)} rows {some[:5]} differ, "
                f"kept {kept[some[:5]]}: {found[key][some[0]][:6]} not {live[key][some[0]][:6]}"
            )
        for state, wanted in states.items():
            got = found.get(f"s{place}.{state}")
            if got is None:
                if "only_weights" not in meta:
                    problems.append(f"{path}: {state} is missing")
                continue
            converted = is_rowwise(spec.fused, state) and came_widths != went
            if converted:
                wanted = means(wanted, went)
            scheme = choice.get("optimizer", "fp32")
            if (
                layout.plan[name] == "data_parallel" or meta["replicated"][place]
            ):  # dense optimizers' state is of the table's type
                got, wanted = narrowed(got, meta, place), narrowed(wanted, meta, place)
            problems += state_problems(path, state, got, wanted, kept, converted, scheme)
    rest = [k for k in found if k.startswith("rest.")]
    problems += [f"{k} differs" for k in rest if k in live and not equal(found[k], live[k])]
    return problems, rows


def means(values: np.ndarray, widths: list[int]) -> np.ndarray:
    blocks = np.split(values.astype(np.float64), np.cumsum(widths)[:-1], axis=1)
    parts = [b.mean(axis=1, keepdims=True).repeat(b.shape[1], 1) for b in blocks]
    return np.concatenate(parts, axis=1).astype(values.dtype)


def narrowed(values: np.ndarray, meta: dict[str, Any], place: int) -> np.ndarray:
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    narrow = torch.from_numpy(values).to(kind[meta["dtypes"][place]])
    found: np.ndarray = narrow.float().numpy()
    return found


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def equal_rows(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Tell of each row whether it has the same bits."""
    a, b = np.ascontiguousarray(one), np.ascontiguousarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.zeros(len(a), bool)
    found: np.ndarray = (a.view(np.uint8) == b.view(np.uint8)).reshape(len(a), -1).all(axis=1)
    return found


def wrong_rows(
    found: np.ndarray,
    live: np.ndarray,
    sums: np.ndarray | None,
    choice: dict[str, Any],
    bits: int | None,
    kept: np.ndarray,
    widths: list[int],
    half: float,
) -> np.ndarray:
    """Tell of each row whether it is beyond its bound, or differs though it was not modified."""
    wrong = kept & ~equal_rows(found, live)
    start = 0
    for width in widths:
        part = slice(start, start + width)
        start += width
        same_bits = equal_rows(found[:, part], live[:, part])
        a, b = found[:, part].astype(np.float64), live[:, part].astype(np.float64)
        with np.errstate(all="ignore"):
            of = None if sums is None else sums[:, part]
            bound = weight_bound(b, of, choice, bits)
            if bound is None:
                continue
            bound = (
                bound + half * abs(b).max(axis=1, keepdims=True) * 1.01 + (2.0**-24) * (half > 0)
            )
            error = abs(a - b)
            if choice.get("method", "adaptive") in L2:
                error = np.sqrt((error**2).sum(axis=1, keepdims=True))
                bound = bound * np.sqrt(width)
            beyond = ~(error <= bound).all(axis=1)
        wrong |= beyond & ~same_bits & ~kept
    return wrong


def state_problems(
    path: str, state: str, got: np.ndarray, wanted: np.ndarray, kept: np.ndarray,
    converted: bool, scheme: str,
) -> list[str]:  # fmt: skip
    if got.dtype != wanted.dtype:
        got, wanted = got.astype(np.float32), wanted.astype(got.dtype).astype(np.float32)
    wrong = ~equal_rows(got, wanted)
    if converted:
        wrong &= ~np.isclose(got, wanted, rtol=3e-7, atol=0).all(axis=1)
    if scheme != "fp32":
        most = SCHEMES[scheme]
        floor = 2.0**-15 * abs(wanted).max(axis=1, keepdims=True) if scheme == "rowlog8" else 0
        near = (abs(got.astype(np.float64) - wanted) <= most * abs(wanted) + floor).all(axis=1)
        wrong &= ~near | (kept & (not converted))
    some = np.flatnonzero(wrong)
    if not len(some):
        return []
    return [
        f"{path} {state} ({scheme}, converted {converted}): rows {some[:5]} of {len(some)} differ, "
        f"kept {kept[some[:5]]}: {got[some[0]][:4]} not {wanted[some[0]][:4]}"
    ]


def same(
    copies: Path, meta: dict[str, Any], found: State, layout: Layout, spec: ModelSpec
) -> list[str]:
    """Compare a restored state with the first restore of the same checkpoint."""
    path, note = copies / f"first-{meta['id']}.npz", copies / f"first-{meta['id']}.layout"
    if not any(k.startswith("rest.") for k in found) and not path.exists():
        return []
    if not path.exists():
        references.store(path, found)
        places = table_names(spec).values()
        note.write_text(json.dumps([(layout.plan[n], layout.widths(n, t.dim)) for n, t in places]))
        return []
    first, plan = references.load(path), json.loads(note.read_text())
    problems = []
    for place, (table, (name, size)) in enumerate(table_names(spec).items()):
        of_first, widths = plan[place]
        alike = widths == layout.widths(name, size.dim)
        for key in [k for k in found if k == f"w{place}" or k.startswith(f"s{place}.")]:
            if key.startswith("s") and is_rowwise(spec.fused, key.split(".")[1]) and not alike:
                continue
            if key not in first or not equal(found[key], first[key]):
                a, b = found[key], first.get(key)
                if b is not None and "data_parallel" in (of_first, layout.plan[name]):
                    a, b = narrowed(a, meta, place), narrowed(b, meta, place)
                    if equal(a, b):
                        continue
                rows = np.flatnonzero(~equal_rows(a, b))[:5] if b is not None else np.empty(0, int)
                some = (
                    ""
                    if b is None
                    else f"{a.dtype} {b.dtype} {rows} {a[rows[:1]]} not {b[rows[:1]]}"
                )
                problems.append(f"{table} {key}: not the bits of the first restore: {some}")
    return problems
