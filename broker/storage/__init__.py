"""The broker's disk: files, snapshots, commit log, index, recovery.  All calls block; no module
imports asyncio.
"""
