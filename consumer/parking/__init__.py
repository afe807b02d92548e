"""Handles the parked messages of a group on a partition, in the consumer that owns the
partition.
"""
