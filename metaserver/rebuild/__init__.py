"""Rebuilds a lost database from the data that brokers store."""
