"""Draw the paper's figures from this package's own runs: one recipe each."""
