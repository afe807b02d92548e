"""`keylane cluster`: writes files for the hosts of a new cluster, and checks a running one."""
