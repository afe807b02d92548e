"""`keylane parked` and `keylane dead`: messages that a consumer group has set aside."""
