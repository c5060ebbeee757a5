"""Checks that run against a server: `memguard`, and what its report is made of."""
