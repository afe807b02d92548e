"""The retry loop of a producer's tasks, and the check whether retries can still succeed."""
