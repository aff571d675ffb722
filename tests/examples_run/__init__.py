"""Run the programs in ``examples/`` unchanged."""
