"""Measure the figures that README and docs print."""
