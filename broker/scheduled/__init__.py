"""Scheduled messages: kept in a separate journal, and stored in their subjects at their delivery
time.
"""
