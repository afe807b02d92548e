"""One file for each version of the schema; the first creates the schema of 0.2.0."""
