"""Scheduled messages: kept in a separate journal, and stored in their subjects when they are
due.
"""
