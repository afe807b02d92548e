"""Determines and stores where new consumer groups start."""
