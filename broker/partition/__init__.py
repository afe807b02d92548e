"""The state and the decisions of a hosted partition. Pure: it imports the protocol only."""
