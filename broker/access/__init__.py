"""What callers of a broker may do, decided without SQL."""
