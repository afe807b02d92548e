"""`keylane broker`: broker groups known to the metaserver, and data folders of stopped brokers."""
