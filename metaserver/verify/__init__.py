"""Compares the database with the brokers; nothing is changed."""
