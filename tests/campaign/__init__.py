"""Test the package by kills, storage faults, damage and hostile input, thousands of trials each.

``python -m tests.campaign --json recipes/results/campaign.json`` runs all parts. A seed and a
number determine every trial; a failure prints the command that repeats the trial.
"""
