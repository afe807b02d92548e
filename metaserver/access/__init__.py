"""Principals, with their tokens and grants in SQL, and the capabilities signed from them."""
