"""How a read of a subject is bounded: instants, and where partitions begin and end.  Pure."""
