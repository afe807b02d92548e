"""The broker's disk: files, snapshots, commit log, index and recovery. All calls block, and no
module imports asyncio.
"""
