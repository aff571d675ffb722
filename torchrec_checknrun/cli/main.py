"""All commands under one roof, and what becomes of errors: one line, exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from torchrec_checknrun.cli import (
    claiming,
    listing,
    planning,
    reading,
    reporting,
    retention,
    verifying,
    writing,
)
from torchrec_checknrun.cli.output import complain
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.version import __version__

app = typer.Typer(
    name="checknrun",
    help="Looks at TorchRec checkpoints, checks, compacts, exports and plans them. ROOT is the "
    "folder or URL that was given to Checkpointer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("ls")(listing.ls)
app.command()(listing.show)
app.command()(verifying.verify)
app.command()(reading.diff)
app.command()(reading.cat)
app.command()(writing.compact)
app.command()(writing.export)
app.command()(retention.prune)
app.command()(retention.pin)
app.command()(retention.unpin)
app.command()(claiming.unlock)
app.command()(claiming.repair)
app.command()(claiming.adopt)
app.command()(planning.plan)
app.command()(reporting.report)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torchrec_checknrun {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """What comes before a command."""


def run(arguments: Sequence[str] | None) -> None:
    """Runs a command and ends the process, see ``cli.main``."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="checknrun")
    except BrokenPipeError:  # its reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CheckNRunError, OSError) as error:
        complain(_text(error))
        sys.exit(2)
    except Exception as error:
        hint = _hint(error.name) if isinstance(error, ImportError) else None
        if hint is None and os.environ.get("CHECKNRUN_DEBUG"):
            raise
        complain(
            hint
            or f"a mistake of this tool, please report it ({type(error).__name__}: {error}); with "
            "CHECKNRUN_DEBUG=1 in the environment it says where"
        )
        sys.exit(2)


def _text(error: Exception) -> str:
    """Without the system's number for it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _hint(module: str | None) -> str | None:
    extra = {"safetensors": "cli", "matplotlib": "cli", "s3fs": "s3"}.get(
        (module or "").split(".")[0]
    )
    return extra and f"{module} is missing: pip install 'torchrec_checknrun[{extra}]'"
