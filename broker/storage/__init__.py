"""The broker's disk: commit log, consume queues, recovery.  All of it blocks; nothing here knows asyncio."""
