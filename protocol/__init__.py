"""Values, routing, frames, batches, errors and clock: what both ends of a call share. No I/O."""
