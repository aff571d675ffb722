"""The paper's figures, drawn from this package's own runs: one recipe each."""
