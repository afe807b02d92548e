"""Messages handed to the user's handler or loop, in order, and again where it fails."""
