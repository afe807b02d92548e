"""Hidden subjects: created for a target, filled by a job, and published in the target by one change
of its route.
"""
