"""Messages that are delivered at a later time: the time, the receipt, the answer to a cancel."""
