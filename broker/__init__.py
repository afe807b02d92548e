"""Stores the partitions of one broker group and serves them to producers, consumers and readers."""
