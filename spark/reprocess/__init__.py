"""Reprocesses fixed ranges of a subject with a versioned job."""
