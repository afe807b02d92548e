"""Hidden subjects, which are created for a target, filled by a job, and published in the target by
a single route change.
"""
