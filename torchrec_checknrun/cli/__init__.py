"""The console tool ``checknrun``: looks at checkpoints, checks, moves and plans them.

No GPU, no process group and no model; any folder or fsspec URL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; ends the process.

    Args:
        arguments: without the program's name; None for the process's own.

    Raises:
        SystemExit: 0; 1 where ``verify`` has found something; 2 where nothing could be done.
    """
    try:
        import rich  # noqa: F401  # only whether it is there
        import typer  # noqa: F401  # as rich
    except ImportError as error:
        print(
            f"checknrun: {error.name} is missing: pip install 'torchrec_checknrun[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from torchrec_checknrun.cli.main import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not if somebody has put another in its place
            # Paths and our own dashes are to be printed wherever the locale is not UTF-8.
            stream.reconfigure(errors="backslashreplace")
    run(arguments)
