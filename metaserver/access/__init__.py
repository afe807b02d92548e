"""Principals, their tokens and grants in SQL, and the capabilities made of them."""
