"""Copies of a broker's data folder: a follower keeps its log byte for byte as the broker has it."""
