"""Hidden subjects: made beside their target, filled, and published in it by one change of its
route.
"""
