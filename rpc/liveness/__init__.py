"""How a client finds that a path to a server is gone without a word, and what it does then."""
