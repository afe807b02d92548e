"""Codecs convert values to bytes and back. Pure."""
