"""Run ``python -m torchrec_checknrun.cli``, the tool where its script isn't on the path."""

from torchrec_checknrun.cli import main

main()
