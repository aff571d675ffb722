"""Start a Python process with this one's imports, safe from stray files in the current directory.

Python puts the current directory, or the script's, before all other entries: a file called
``json.py`` there would run in the new process. And a process that sets its parent-death signal only
after its imports outlives a parent that is killed meanwhile. So the new process is started isolated
(``-I``), without ``site`` (``-S``), on a few lines that need the standard library only: these tie
the process to its parent, then set the import path, then load this package from its place here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torchrec_checknrun
from torchrec_checknrun.errors import SaveFailed

_BOOTSTRAP = """
import os, signal, sys
parent = int(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    os._exit(1)
library = list(sys.path)
import importlib, importlib.util, json, site
site.main()
path, package, init, module, arguments = json.loads(sys.argv[2])
sys.path[:] = library + [entry for entry in path if entry not in library]
if os.path.isfile(init):
    spec = importlib.util.spec_from_file_location(
        package, init, submodule_search_locations=[os.path.dirname(init)]
    )
    sys.modules[package] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package])
importlib.import_module(module).main(*arguments)
"""
"""Ctrl-C and a preemption's SIGTERM are ignored: the parent answers them, and may want one more
checkpoint.
"""


def start(
    module: str, *arguments: int | float | str, descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Run ``main(*arguments)`` of a module of this package in a process that ends with this one.

    On Linux the process ends with the calling thread.

    Args:
        descriptors: file descriptors to pass on, open.

    Raises:
        SaveFailed: the system doesn't start the interpreter.
    """
    package = torchrec_checknrun.__name__
    init = str(torchrec_checknrun.__file__)
    target = json.dumps([import_path(), package, os.path.abspath(init), module, arguments])
    interpreter = sys.executable or ""  # None where a program embeds Python
    try:
        return subprocess.Popen(
            [interpreter, *_flags(), "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), target],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            cwd=_directory(),
        )
    except OSError as error:
        raise SaveFailed(
            f"the interpreter {interpreter!r} (sys.executable) can't be started for a process that "
            f"works behind training ({error}): let sys.executable be the path of a Python "
            "interpreter that this user may execute, or use background='thread' and no "
            "compact_after"
        ) from error


def import_path() -> list[str]:
    """List the new process's import path: this one's, with the current directory and the script's
    moved to the end, and left out if only an empty entry names them.
    """
    entries = [e for e in sys.path if isinstance(e, str) and os.path.isabs(e)]
    doubtful: set[str] = set()
    with suppress(OSError):  # the directory may be gone
        doubtful.add(os.path.realpath(os.getcwd()))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        doubtful.add(str(Path(script).resolve().parent))
    last = [e for e in entries if os.path.realpath(e) in doubtful]
    return [e for e in entries if e not in last] + last


def _directory() -> str | None:
    """Return where the new process begins; None: in this one's directory.

    Where that is gone, MKL can't be loaded, and ends the process.
    """
    try:
        os.getcwd()
    except OSError:
        return os.path.sep
    return None


def _flags() -> list[str]:
    """List this interpreter's options that come from the environment, which ``-I`` ignores."""
    flags = ["-B"] if sys.flags.dont_write_bytecode else []
    return flags + (["-X", "utf8"] if sys.flags.utf8_mode else [])
