"""Define ``ls`` and ``show``, which describe a root from its manifests alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from torchrec_checknrun.cli.output import (
    AsJson,
    MaybeId,
    Root,
    complain,
    number,
    open_root,
    print_json,
    print_table,
    reproducible,
    say,
    size,
)
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.format.losses import portion
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.root.catalog import Inventory, Listed, inventory
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder


def ls(root: Root, as_json: AsJson = False) -> None:
    """List checkpoints, newest first."""
    found = inventory(open_root(root))
    if as_json:
        print_json(_listing(found))
        return
    numbers = (">step", ">kind", ">bytes", ">modified", ">chain", ">to restore")
    print_table(("id", *numbers, "created", ""), map(_row, found.checkpoints))
    for listed in found.checkpoints:
        if listed.problem is not None:
            say(f"{listed.id}: {listed.problem}", style="red")
    for problem in found.problems:
        say(problem, style="red")
    if found.claim is not None and found.alive:
        say(f"in use by {found.claim.holder}")


def _row(listed: Listed) -> list[str]:
    manifest = listed.manifest
    notes: list[str] = [] if listed.status == "restorable" else [listed.status]
    notes += ["pinned"] if listed.pinned else []
    if manifest is None:
        return [listed.id, "", "", size(listed.bytes), "", "", "", "", ", ".join(notes)]
    return [
        listed.id,
        str(manifest.step),
        manifest.kind,
        size(listed.bytes),
        f"{manifest.modified_fraction:.1%}",
        str(len(listed.chain) or "–"),
        size(listed.chain_bytes) if listed.chain else "–",
        manifest.created_at[:19].replace("T", " "),
        ", ".join(notes),
    ]


def _listing(found: Inventory) -> dict[str, Any]:
    writer = None
    if found.claim is not None:
        writer = {
            "epoch": found.claim.epoch,
            "alive": found.alive,
            "holder": str(found.claim.holder),
        }
    return {
        "writer": writer,
        "problems": list(found.problems),
        "checkpoints": [_of_listed(c) for c in found.checkpoints],
    }


def _of_listed(listed: Listed) -> dict[str, Any]:
    manifest = listed.manifest
    return {
        "id": listed.id,
        "status": listed.status,
        "pinned": listed.pinned,
        "bytes": listed.bytes,
        "chain": list(listed.chain),
        "chain_bytes": listed.chain_bytes,
        "problem": listed.problem,
        **({} if manifest is None else _of_manifest(manifest)),
    }


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    names = ("step", "sequence", "kind", "created_at", "modified_fraction", "lossy", "bits")
    return {
        **{name: getattr(manifest, name) for name in names},
        "parent": manifest.parent.id if manifest.parent else None,
        "previous": manifest.previous.id if manifest.previous else None,
    }


def show(root: Root, id: MaybeId = None, as_json: AsJson = False) -> None:
    """Show one checkpoint, by default the newest: tables, codecs, bytes, errors."""
    folder = open_root(root)
    listed = _choose(inventory(folder), id, folder)
    manifest = listed.manifest or read_manifest(folder, listed.id)
    if as_json:
        print_json(_details(listed, manifest))
        return
    facts = {
        "step": str(manifest.step),
        "kind": manifest.kind,
        "status": listed.status + (", pinned" if listed.pinned else ""),
        "created": f"{manifest.created_at} by {manifest.created_by}",
        "builds on": manifest.parent.id if manifest.parent else "nothing",
        "came after": manifest.previous.id if manifest.previous else "nothing",
        "chain": f"{len(listed.chain)} checkpoints, {size(listed.chain_bytes)}",
        "bytes": f"{size(listed.bytes)}, {size(manifest.dense_bytes)} of them outside tables; "
        f"full in fp32 {size(manifest.full_fp32_bytes)}",
        "rows": f"{manifest.modified_fraction:.2%} of all",
        "ranks": f"{manifest.world_size}, {len(manifest.files)} files",
        "asked for": "exact" if manifest.bits is None else f"{manifest.bits} bit",
        "restored from lossy": f"{manifest.lossy_restores} times before",
        "reproducible": reproducible(not manifest.losses, portion(manifest.losses)),
        "lineage, epoch": f"{manifest.lineage or '–'}, {manifest.epoch}",
        "states": ", ".join(
            name + (" (per rank)" if per_rank else "")
            for name, per_rank in sorted(manifest.states.items())
        ),
    }
    if listed.problem is not None:
        facts["problem"] = listed.problem
    say(listed.id, style="bold")
    print_table(("", ""), map(list, facts.items()))
    numbers = (">rows × dim", ">stored", ">weights", ">optimizer", ">ids")
    rows = [_table_row(name, table) for name, table in manifest.tables.items()]
    print()
    print_table(("table", *numbers, "codecs", ">mean error", ">largest"), rows)


def _choose(found: Inventory, id: str | None, root: Folder) -> Listed:
    if id is None:
        for listed in found.checkpoints:
            if listed.status == "restorable":
                return listed
            if listed.problem is not None or listed.status == "ignored":
                complain(f"passed over: {listed.id}: {listed.problem or 'it does not count'}")
        raise CheckpointNotFound(f"{root} holds no restorable checkpoint: see `checknrun ls`")
    for listed in found.checkpoints:
        if listed.id == id:
            return listed
    raise CheckpointNotFound(f"no checkpoint {id!r} in {root}: see `checknrun ls`")


def _table_row(name: str, table: TableTotals) -> list[str]:
    return [
        name,
        f"{table.rows:,} × {table.dim}",
        f"{table.stored_values / max(1, table.rows * table.dim):.2%}",
        size(table.weight_bytes),
        size(table.optimizer_bytes),
        size(table.ids_bytes),
        ", ".join(_codec(codec) for codec in table.codecs) or "–",
        number(table.error_mean, ".2e"),
        number(table.error_max, ".2e"),
    ]


def _codec(spec: Mapping[str, object]) -> str:
    """Return a codec's name and its parameters."""
    parts = [f"{k} {v}" for k, v in spec.items() if k not in ("name", "version")]
    return str(spec.get("name")) + (f" ({', '.join(parts)})" if parts else "")


def _details(listed: Listed, manifest: Manifest) -> dict[str, Any]:
    return {
        **_of_listed(listed),
        "created_by": manifest.created_by,
        "world_size": manifest.world_size,
        "lineage": manifest.lineage,
        "epoch": manifest.epoch,
        "lossy_restores": manifest.lossy_restores,
        "pls": portion(manifest.losses),
        "reproducible": not manifest.losses,
        "losses": to_builtins(manifest.losses),
        "dense_bytes": manifest.dense_bytes,
        "full_fp32_bytes": manifest.full_fp32_bytes,
        "states": {name: "per rank" if own else "all" for name, own in manifest.states.items()},
        "files": [{"name": f.name, "bytes": f.size, "chunks": f.chunks} for f in manifest.files],
        "tables": to_builtins(manifest.tables),
    }
