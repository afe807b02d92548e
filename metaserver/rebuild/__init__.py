"""Rebuilds a lost database from the facts that brokers store."""
