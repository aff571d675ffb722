"""Run the command."""

from recipes.benchmarks.stall.run import main

main()
