"""Principals, their tokens and grants in SQL, and the capabilities that are signed from them."""
