"""The members of a cluster: the versions that they report, and the metaserver's view of them.
Pure.
"""
