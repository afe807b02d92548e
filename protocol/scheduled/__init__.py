"""Messages with a later delivery: the time, the receipt, the outcome of a cancel."""
