"""`keylane access`: tokens and rights."""
