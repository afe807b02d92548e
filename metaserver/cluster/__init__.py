"""Database rows of brokers, subjects, partitions and queues, and of the groups that each broker
knows.
"""
