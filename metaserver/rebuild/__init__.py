"""Rebuilds a lost database from the facts that the brokers keep."""
