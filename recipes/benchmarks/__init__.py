"""Measurements behind the figures that README and docs print."""
