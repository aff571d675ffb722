"""Run jobs, figures and benchmarks with the package as users do."""
