"""Database rows of brokers, subjects, partitions and queues, and which groups each broker knows."""
