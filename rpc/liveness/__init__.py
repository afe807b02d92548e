"""How a client notices that a path to a server has been lost silently, and what it does then."""
