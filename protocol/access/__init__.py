"""Principals, tokens, grants and capabilities, which say who may do what."""
