"""`keylane cluster`: files for the hosts of a new cluster, and checks of one from a host."""
