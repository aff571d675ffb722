"""Measure how long training waits for a checkpoint: ``python -m recipes.benchmarks.stall``."""
