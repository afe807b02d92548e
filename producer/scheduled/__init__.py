"""Sends scheduled messages to brokers that keep them, and cancels them."""
