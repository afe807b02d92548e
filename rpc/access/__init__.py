"""Authentication and authorization of clients and servers, with tokens and capabilities."""
