"""The repeated tries of a producer's tasks, one after another, until it is known that none can
succeed.
"""
