"""What can be done from the console, each act with the command that does the same."""
