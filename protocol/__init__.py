"""Values, routing, frames, batches, errors and the clock: everything that both ends of a call
share. Performs no I/O.
"""
