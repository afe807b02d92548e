"""The contract both ends read: values, routing maths, frames, batches, errors, clock.  No I/O."""
