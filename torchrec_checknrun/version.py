"""The package's version, defined here only; setup.py reads this file, too."""

__version__ = "0.1.0"
