"""`keylane broker`: brokers as the metaserver sees them, and data folders that no broker uses."""
