"""Install this checkout by `python torchrec_checknrun/install.py`, under the earlier name."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    package = Path(__file__).resolve().parents[1] / "torchrec_checknrun"
    runpy.run_path(str(package / "install.py"), run_name="__main__")
