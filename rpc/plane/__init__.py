"""The server's side of the data plane: its connections, and how their frames are answered."""
