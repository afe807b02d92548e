"""Scheduled messages: kept in a journal of their own, and stored in their subjects when their time
has come.
"""
