"""`keylane spark`: work on subjects with Spark."""
