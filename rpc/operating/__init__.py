"""Operational parts of a server: metrics, health, logs, and settings that are reloaded on
SIGHUP.
"""
