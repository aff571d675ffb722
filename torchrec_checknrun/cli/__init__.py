"""Provide the console tool ``checknrun``, which lists, verifies, changes and plans checkpoints.

Commands need no GPU, process group or model, and take any folder or fsspec URL. Read
``commands.py`` first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process.

    Args:
        arguments: without the program's name; None for the process's own.

    Raises:
        SystemExit: with code 0; 1 if ``verify`` found damage; 2 if the command failed.
    """
    try:
        import rich  # noqa: F401  # only to find out whether it is installed
        import typer  # noqa: F401  # as rich
    except ImportError as error:
        print(
            f"checknrun: {error.name} is missing: pip install 'torchrec_checknrun[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from torchrec_checknrun.cli.commands import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not a replacement, as of a notebook
            # Paths and our own dashes must print even where the locale is not UTF-8.
            stream.reconfigure(errors="backslashreplace")
    run(arguments)
