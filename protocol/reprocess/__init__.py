"""Requests and manifests of jobs that reprocess messages."""
