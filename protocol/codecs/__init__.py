"""Codecs, which turn a value into bytes, and bytes into a value. Pure."""
