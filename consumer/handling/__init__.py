"""Hands messages to the user's handler or loop, in order, and retries those that fail."""
