"""Scheduled messages: sending them to brokers that keep them, and canceling them."""
