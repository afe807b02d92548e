"""Scheduled messages: kept in the commit log, and stored in their subjects when they are
due.
"""
