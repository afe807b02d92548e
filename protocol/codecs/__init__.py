"""Codecs: what makes bytes of a value, and a value of bytes.  Pure."""
