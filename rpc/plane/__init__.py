"""The data plane at the server: its connections, and how their frames are answered."""
