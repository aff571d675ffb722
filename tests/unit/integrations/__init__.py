"""Test the integrations with trainers, generators and loggers."""
