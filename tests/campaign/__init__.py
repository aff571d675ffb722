"""A campaign against the package: kills, storage faults, damage and hostile input, thousands each.

``python -m tests.campaign --json recipes/results/campaign.json`` runs all of it. Every trial is
drawn from a seed and a number; what a failure prints is the command that repeats it.
"""
