"""One file per version of the schema; the first one creates the schema of 0.2.0."""
