"""Spark reads and writes keylane: a Python data source, and what a local session needs."""
