"""The broker's storage: files, snapshots, commit log, index and recovery. All calls block; no
module imports asyncio.
"""
