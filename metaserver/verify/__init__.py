"""Compares the database with the brokers, without changing anything."""
