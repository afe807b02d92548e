"""Scheduled messages: delivery time, receipt, outcome of a cancellation."""
