"""Connections of the data plane at both ends: the upgrade that opens them, and their bytes."""
