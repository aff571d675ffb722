"""The package's version, and what tells the compiled sources of one checkout from another's.

Without imports of the package: setup.py reads this file, too.
"""

import hashlib
from pathlib import Path

__version__ = "0.1.0"


def sources_digest(csrc: Path) -> str:
    """Digest a folder of C++ sources, which a library is built of: their names and contents."""
    files = sorted(path for path in csrc.iterdir() if path.suffix in (".h", ".cpp"))
    each = (f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files)
    return hashlib.sha256("\n".join(each).encode()).hexdigest()
