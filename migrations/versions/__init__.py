"""One file for each step of the schema; the first makes the schema of 0.2.0."""
