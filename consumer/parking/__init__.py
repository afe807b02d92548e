"""The parked messages of a group on a partition, at its owner."""
