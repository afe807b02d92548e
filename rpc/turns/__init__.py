"""What costs little in a turn of the event loop: writes to a socket gathered, functions run on a thread."""
