"""What a hosted partition is and decides.  Pure: it imports the protocol only."""
