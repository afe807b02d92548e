"""Where the batches of each partition lie in the log: an interface and two kinds."""
