"""What retention needs of the metaserver: brokers told of groups, empty partitions taken out of routes."""
