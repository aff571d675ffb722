"""The programs in ``examples/``, run as they are."""
