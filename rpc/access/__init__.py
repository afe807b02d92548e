"""Authentication and authorization: tokens and capabilities, at clients and servers."""
