"""Rows of brokers, subjects, partitions, queues, and of the consumer groups that brokers know."""
