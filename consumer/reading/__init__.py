"""Reading a subject without a group: from where to where, which partitions, in which order."""
