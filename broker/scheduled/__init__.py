"""Scheduled messages: they are kept in a journal of their own, and stored in their subjects at
their time.
"""
