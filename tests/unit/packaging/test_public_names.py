"""Reach public names by the package alone, as ``import torchrec_checknrun as cnr`` does."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torchrec_checknrun as cnr
assert "torch" not in sys.modules  # Hydra imports the package in every app
for name in dir(cnr):
    getattr(cnr, name)
print(cnr.elastic.init_process_group.__name__, cnr.policy.Full is cnr.Full)
"""


def test_every_public_name_is_an_attribute() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "init_process_group True\n", done.stderr
