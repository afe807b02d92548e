"""Principals, tokens, grants and capabilities: who may do what."""
