"""Tries of a producer's tasks: each one behind the last, until it is known that none can
succeed.
"""
