"""`keylane subject`: subjects, and changes of their partitions."""
