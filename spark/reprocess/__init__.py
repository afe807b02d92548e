"""Reprocesses fixed ranges of a subject by a versioned job."""
