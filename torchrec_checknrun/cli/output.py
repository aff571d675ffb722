"""Print for all commands alike: JSON alone on stdout, tables for people, progress on stderr."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleDimensions, JustifyMethod
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.root.checkpoints import Listing, committed
from torchrec_checknrun.store.deadlines import TIMEOUT_SECONDS
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import masked, retry_seconds

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that move a cursor, change the direction of text, or can't be printed at all."""

_COMPLETION_SECONDS = 2.0
"""The longest wait of a shell, at one key, for a storage that doesn't answer."""
_UNWRAPPED = 1_000_000
"""Columns of what is not to be wrapped: tables, and output that goes to no terminal."""
_PATIENCE_SECONDS = 300.0
"""The longest wait for a storage that doesn't answer at all, drivers' own retries included."""

Step = Callable[[int, int], object]
"""Receives the work done so far and the whole work."""


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a checkpoint's id from the root typed before it."""
    root = context.params.get("root")
    if not root:
        return []
    logged = logging.root.manager.disable
    logging.disable()  # warnings of retries would stand in the line that is being typed
    try:
        folder = Folder(root, _COMPLETION_SECONDS)
        listing = Listing.of(folder.names())
        ids = committed(folder, listing.only(listing.ids))
        return [id for id in ids if id.startswith(incomplete)]
    except Exception:  # completion must not disturb the shell
        return []
    finally:
        logging.disable(logged)


def _ids(text: str) -> Any:
    """Declare an argument that takes ids."""
    return typer.Argument(help=text, autocompletion=_complete, show_default=False)


Root = Annotated[str, typer.Argument(help="Folder or URL of the checkpoints.", show_default=False)]
Id = Annotated[str, _ids("A checkpoint's id.")]
MaybeId = Annotated[str | None, _ids("A checkpoint's id; default: the newest restorable one.")]
Ids = Annotated[list[str] | None, _ids("Ids; default: all.")]
SomeIds = Annotated[list[str], _ids("Checkpoints' ids.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


def open_root(url: str) -> Folder:
    """Open the root, or the target, that a command was given.

    Raises:
        CheckNRunError: fsspec can't open such a URL here, or it is a file.
    """
    # Retries fit in, see ``Folder``; a training job is more patient.
    patience = min(TIMEOUT_SECONDS, max(_PATIENCE_SECONDS, 1.5 * retry_seconds()))
    try:
        folder = Folder(url, patience)
    except ImportError as error:
        extra = "s3" if url.startswith(("s3:", "s3a:")) else None
        remedy = f"pip install 'torchrec_checknrun[{extra}]'" if extra else "install that module"
        raise CheckNRunError(f"{url} can't be opened: {error}: {remedy}") from error
    except (ValueError, TypeError) as error:  # an unknown protocol, or a missing part
        raise CheckNRunError(
            f"{url} can't be opened: {error}: give a folder or a URL that fsspec knows"
        ) from error
    # Stores of objects may hold one of that name beside what is in the "folder".
    if "://" not in folder.url and folder.parent.size(folder.name) is not None:
        raise CheckNRunError(
            f"{folder} is a file, where a folder should be: name the folder or URL that was given "
            "to Checkpointer"
        )
    return folder


def print_json(document: object) -> None:
    """Print JSON that any parser accepts: NaN and infinities as strings.

    The output is ASCII, so that no terminal acts upon it, whatever its encoding is.
    """
    print(json.dumps(plain(document), indent=2, allow_nan=False))


def clean(text: str) -> str:
    """Return a text from a manifest, path or error as one printable line, without passwords."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", masked(text))


def say(text: str, style: str | None = None) -> None:
    """Print a line on stdout."""
    console().print(clean(text), style=style)


def complain(text: str) -> None:
    """Print a line on stderr."""
    if sys.stderr is not None:  # closed; print would take stdout
        print(f"checknrun: {clean(text)}", file=sys.stderr)


def plain(value: Any) -> Any:
    """Return a value with strings in place of floats that JSON doesn't have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def print_table(headings: Iterable[str], rows: Iterable[list[str]]) -> None:
    """Print a table in its own width: a narrow terminal wraps lines, and all cells are whole.

    Args:
        headings: of the columns; those that begin with ``>`` are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        name = heading.removeprefix(">")
        side: JustifyMethod = "left" if name == heading else "right"
        table.add_column(name, justify=side)
    for row in rows:
        table.add_row(*map(clean, row))
    out = console()
    _widen(out)
    out.print(table)


def console() -> Console:
    """Return a console for stdout, wide enough not to wrap piped output."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        _widen(out)
    return out


def _widen(out: Console) -> None:
    # With the height: without one, a dumb terminal's width stays that which rich gives it.
    out.size = ConsoleDimensions(_UNWRAPPED, out.height)


@contextmanager
def progress(what: str) -> Iterator[Step]:
    """Show a progress bar on stderr until done; nothing where stderr is no terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def size(count: float) -> str:
    """Format bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # or three digits would be written as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def number(value: float | None, form: str = ".3g") -> str:
    """Format a number, or a dash for None."""
    return "–" if value is None else format(value, form)


def reproducible(yes: bool, pls: float) -> str:
    """Say whether a run could be repeated bit for bit, and what was lost."""
    if yes:
        return "bit for bit"
    return f"not bit for bit: {pls:.3g} of the samples were lost (PLS) in partial recoveries"
