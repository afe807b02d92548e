"""Explains why messages of a subject do not arrive at a consumer group."""
