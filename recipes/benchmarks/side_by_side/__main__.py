"""Run ``python -m recipes.benchmarks.side_by_side``; see ``run``."""

import sys

from recipes.benchmarks.side_by_side.run import main

sys.exit(main())
