"""What there is: rows of brokers, subjects, partitions and their queues, and who has heard of which group."""
