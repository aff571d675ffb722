"""Start a Python process that imports what this one imports, and nothing that lies about.

Python puts the current directory, or the script's, before everything else: a file called
``json.py`` there would run in the new process. And a process that sets its parent-death signal only
after its imports outlives a parent that is killed meanwhile. So the new process is started isolated
(``-I``), without ``site`` (``-S``), on a few lines that need the standard library only: they tie it
to its parent, then make the import path, then load this package from where it is here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torchrec_checknrun

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
"""Ctrl-C and a preemption's SIGTERM are the parent's to answer: it may want one more checkpoint."""


def start(
    module: str, *arguments: int, descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Run ``main(*arguments)`` of a module of this package in a process that ends with this one.

    On Linux it ends with the thread that calls this.

    Args:
        descriptors: open in the process, too.
    """
    package = torchrec_checknrun.__name__
    init = str(torchrec_checknrun.__file__)
    what = json.dumps([import_path(), package, os.path.abspath(init), module, arguments])
    return subprocess.Popen(
        [sys.executable, *_flags(), "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), what],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
    )


def import_path() -> list[str]:
    """List where the new process looks for modules: as here, but in the current directory and the
    script's only for what is nowhere else, and not at all if only an empty entry names them.
    """
    entries = [e for e in sys.path if isinstance(e, str) and os.path.isabs(e)]
    doubtful: set[str] = set()
    with suppress(OSError):  # it may be gone
        doubtful.add(os.path.realpath(os.getcwd()))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        doubtful.add(str(Path(script).resolve().parent))
    last = [e for e in entries if os.path.realpath(e) in doubtful]
    return [e for e in entries if e not in last] + last


def _flags() -> list[str]:
    """Options of this interpreter that ``-I`` would keep from the environment."""
    flags = ["-B"] if sys.flags.dont_write_bytecode else []
    return flags + (["-X", "utf8"] if sys.flags.utf8_mode else [])
