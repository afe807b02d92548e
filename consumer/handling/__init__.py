"""Hands messages to the user's handler or loop, in order, and again where a try fails."""
