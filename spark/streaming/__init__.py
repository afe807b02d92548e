"""`readStream`: batches of a subject in the order of its lineage, through resizes and moves."""
