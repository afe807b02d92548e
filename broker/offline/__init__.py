"""Offline tools for a data folder that no broker uses: inspect it, or rebuild its index."""
