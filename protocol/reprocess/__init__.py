"""Requests of jobs that reprocess messages, and the files that they leave."""
