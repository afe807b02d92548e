"""The members of a cluster as they tell of themselves: their versions, and what the metaserver says
of them.  Pure.
"""
