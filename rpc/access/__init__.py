"""Identities on connections: tokens and capabilities at both ends."""
