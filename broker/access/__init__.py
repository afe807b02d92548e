"""Decides what callers of a broker may do, without SQL."""
