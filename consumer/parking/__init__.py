"""What a group has set aside of a partition, at its owner."""
