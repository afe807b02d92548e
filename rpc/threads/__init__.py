"""Functions run on a thread, at the cost of one entry in a queue and one callback."""
