"""What a job that reprocesses messages asks of brokers, and leaves behind."""
