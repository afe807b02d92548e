"""The data plane at the server: connections, and how their frames are answered."""
