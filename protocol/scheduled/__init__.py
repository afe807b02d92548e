"""Scheduled messages: delivery times, receipts, and the outcomes of cancellations."""
