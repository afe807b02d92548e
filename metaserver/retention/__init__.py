"""Retention at the metaserver: brokers are told of groups, empty partitions leave the routes."""
