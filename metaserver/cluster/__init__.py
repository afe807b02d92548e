"""Rows of brokers, subjects, partitions and queues, and of the groups that brokers know."""
