"""Data-plane connections at both ends: the upgrade that opens them, and their bytes."""
