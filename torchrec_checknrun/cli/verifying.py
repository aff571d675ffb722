"""``verify``: reads every byte and says what is wrong."""

from __future__ import annotations

from dataclasses import asdict

import typer

from torchrec_checknrun.cli.output import (
    AsJson,
    Ids,
    Root,
    open_root,
    print_json,
    print_table,
    progress,
    say,
    size,
)
from torchrec_checknrun.errors import CheckpointNotFound


def verify(root: Root, ids: Ids = None, as_json: AsJson = False) -> None:
    """Reads all bytes of checkpoints and of what they need; exit code 1 if anything is wrong."""
    from torchrec_checknrun.tools import verify as verification

    folder = open_root(root)
    with progress("verifying") as step:
        found = verification.verify(folder.url, ids or None, progress=step)
    if not found:
        raise CheckpointNotFound(f"no committed checkpoint in {folder}")
    sound = not any(one.problems for one in found)
    if as_json:
        print_json({"sound": sound, "checkpoints": [asdict(one) for one in found]})
    else:
        columns = {"id": "left", "bytes": "right", "chunks": "right", "": "left"}
        rows = [
            [one.id, size(one.bytes), str(one.chunks), "damaged" if one.problems else "sound"]
            for one in found
        ]
        print_table(None, columns, rows)
        for one in found:
            for problem in one.problems:
                say(f"{one.id}: {problem}", style="red")
    if not sound:
        raise typer.Exit(1)
