"""Print the tables of the docs: ``python -m recipes.benchmarks.side_by_side_markdown [FILE]``.

Equivalent to ``python -m recipes.benchmarks.side_by_side.markdown``.
"""

from recipes.benchmarks.side_by_side.markdown import main

if __name__ == "__main__":
    main()
