"""The metaserver's part in retention: announces groups to brokers, and removes empty partitions,
idle groups and subjects, and old history.
"""
