"""Define ``report``, which draws a run's checkpoints as one HTML page or PNG.

Bytes and fractions come from the manifests in the root. The stall comes from the JSON lines that a
training loop wrote of its checkpoints (``CheckpointReport.to_json()``, one a line, or among other
events), and so do checkpoints that were deleted since.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from torchrec_checknrun.cli.events import is_checkpoint, no_report, read_events
from torchrec_checknrun.cli.output import (
    AsJson,
    Root,
    complain,
    open_root,
    print_json,
    progress,
    say,
    size,
)
from torchrec_checknrun.cli.plots import Point, draw
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.format.checks import Count, Measure, Text, typed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.report import Progress, checkpoint_report
from torchrec_checknrun.store.folder import Folder

PARTS = ("weights", "optimizer", "ids", "dense", "other")
"""The parts of a checkpoint's bytes."""


class _Logged(msgspec.Struct):
    """The fields read of a checkpoint's line."""

    id: Text
    kind: Text
    sequence: Count
    step: Count
    full_fp32_bytes: Count
    modified_fraction: Measure
    stall_seconds: Measure
    parent: Text | None
    bytes: dict[Text, Count]


def report(
    root: Root,
    out: Annotated[Path, typer.Option(help="The .html (self-contained) or .png file.")] = Path(
        "report.html"
    ),
    log: Annotated[
        Path | None,
        typer.Option(help="JSON lines of the run, for the stall and deleted checkpoints."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw bytes, capacity, rows written and stall over the run."""
    if out.suffix not in (".html", ".png"):
        raise typer.BadParameter(f"{out} should end in .html or .png")
    with progress("looking at checkpoints"):
        folder = open_root(root)
        points = collect(folder, log)
    if as_json:
        print_json({"checkpoints": [asdict(point) for point in points]})
        return
    picture = draw(points)
    out.write_bytes(
        picture if out.suffix == ".png" else _page(str(folder), points, picture).encode()
    )
    say(f"{len(points)} checkpoints in {out}")


def collect(root: Folder, log: Path | None) -> list[Point]:
    """Return all known checkpoints in the order of their sequence numbers.

    Raises:
        CheckpointNotFound: there are none.
        CheckNRunError: a line of the log is malformed.
    """
    logged = {} if log is None else read_log(log)
    known: dict[str, dict[str, Any]] = dict(logged)
    try:
        found = inventory(root).checkpoints
    except CheckpointNotFound:
        if not logged:
            raise
        found = ()
    for listed in found:
        if listed.manifest is not None:
            known[listed.id] = {
                **_of_manifest(listed.manifest, listed.bytes),
                "stall_seconds": logged.get(listed.id, {}).get("stall_seconds"),
            }
        elif listed.problem is not None:
            complain(f"left out: {listed.id}: {listed.problem}")
    if not known:
        raise CheckpointNotFound(f"no committed checkpoint in {root}: nothing to report")
    points: dict[str, Point] = {}
    for id, fields in sorted(known.items(), key=lambda item: (item[1]["sequence"], item[0])):
        before: int | None = 0
        if (parent := fields["parent"]) is not None:
            before = points[parent].kept_bytes if parent in points else None
        kept = None if before is None else before + sum(fields["bytes"].values())
        points[id] = Point(**fields, kept_bytes=kept)
    return list(points.values())


def read_log(path: Path) -> dict[str, dict[str, Any]]:
    """Read the checkpoints of a log of JSON lines, by id; skip lines of other events.

    Raises:
        CheckNRunError: no line is JSON, or a checkpoint's line lacks a field.
        OSError: there is no such file.
    """
    found = {}
    for number, event in read_events(path):
        try:
            if not is_checkpoint(event):
                continue
            logged = typed(event, _Logged)
            msgspec.json.encode(logged)  # refuses lone surrogates
            parts = _by_part(logged.bytes, sum(logged.bytes.values()))
            found[logged.id] = {**msgspec.structs.asdict(logged), "bytes": parts, "there": False}
        except ValueError as error:
            raise no_report(path, number, repr(error)) from error
    return found


def _of_manifest(manifest: Manifest, size: int) -> dict[str, Any]:
    known = checkpoint_report(manifest, 1, Progress()).to_json()
    fields = {name: known[name] for name in _Logged.__struct_fields__}
    return {**fields, "bytes": _by_part(known["bytes"], size), "there": True}


def _by_part(stored: Mapping[str, int], size: int) -> dict[str, int]:
    """Split a checkpoint's ``size`` bytes into ``PARTS``, of which all but ``other`` are given."""
    parts = {part: stored.get(part, 0) for part in PARTS[:-1]}
    return {**parts, "other": size - sum(parts.values())}


def _page(root: str, points: list[Point], picture: bytes) -> str:
    image = base64.b64encode(picture).decode()
    total, full = sum(p.total for p in points), sum(p.full_fp32_bytes for p in points)
    times = f", {full / total:.1f} times less than full checkpoints in fp32" if full else ""
    headings = ("checkpoint", "step", "kind", "bytes", "modified", "to restore", "stall", "")
    rows = [
        (
            p.id,
            p.step,
            p.kind,
            size(p.total),
            f"{p.modified_fraction:.1%}",
            "–" if p.kept_bytes is None else size(p.kept_bytes),
            "–" if p.stall_seconds is None else f"{1000 * p.stall_seconds:.3g} ms",
            "" if p.there else "deleted",
        )
        for p in points
    ]
    body = "\n".join(_cells(row, "td") for row in rows)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Checkpoints of {html.escape(root)}</title>
<style>
body {{ font: 15px sans-serif; margin: 2em auto; max-width: 70em; }}
img {{ max-width: 100%; }} td, th {{ padding: 0.2em 0.8em; text-align: left; }}
</style></head><body>
<h1>Checkpoints of {html.escape(root)}</h1>
<p>{len(points)} checkpoints, {size(total)}{times}.</p>
<img alt="bytes, capacity, rows written and stall" src="data:image/png;base64,{image}">
<table>{_cells(headings, "th")}
{body}</table></body></html>
"""


def _cells(values: tuple[object, ...], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(v))}</{tag}>" for v in values) + "</tr>"
