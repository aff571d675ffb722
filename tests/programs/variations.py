"""What teams do to the quick start."""
