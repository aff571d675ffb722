"""Collect all commands, and report an error in one line with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from torchrec_checknrun.cli import changing, listing, planning, reading, reporting
from torchrec_checknrun.cli.output import complain
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.version import __version__

app = typer.Typer(
    name="checknrun",
    help="List, verify, compact, export and plan TorchRec checkpoints. ROOT is the folder or URL "
    "that was given to Checkpointer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(listing.ls, listing.show, reading.verify, reading.diff, reading.cat),
    *(changing.compact, changing.export, changing.prune, changing.pin, changing.unpin),
    *(
        changing.publish,
        changing.unlock,
        changing.repair,
        changing.adopt,
        planning.plan,
        reporting.report,
    ),
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torchrec_checknrun {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Define the options that precede a command."""


def run(arguments: Sequence[str] | None) -> None:
    """Run a command and end the process; see ``cli.main``."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="checknrun")
    except BrokenPipeError:  # the reader has seen enough, as `head` does
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
            or f"internal error, please report it ({type(error).__name__}: {error}); set "
            "CHECKNRUN_DEBUG=1 in the environment to see the traceback"
        )
        sys.exit(2)


def _text(error: Exception) -> str:
    """Return an error's text without the system's error number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _hint(module: str | None) -> str | None:
    extra = {"safetensors": "cli", "matplotlib": "cli", "s3fs": "s3"}.get(
        (module or "").split(".")[0]
    )
    return extra and f"{module} is missing: pip install 'torchrec_checknrun[{extra}]'"
