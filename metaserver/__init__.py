"""The metaserver: keeps brokers, subjects, consumer groups and leases in an SQL database."""
