"""Retention at the metaserver: announces groups to brokers, and removes empty partitions from
routes.
"""
