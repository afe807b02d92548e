"""The metaserver: stores brokers, subjects, consumer groups and leases in an SQL database."""
