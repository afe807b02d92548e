"""`keylane subject`: subjects, and changes to their partitions."""
