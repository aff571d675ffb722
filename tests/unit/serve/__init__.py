"""Tests of followers: models that are kept at the newest state of a root."""
