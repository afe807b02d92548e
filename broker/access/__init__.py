"""The broker's access control, which works without the database."""
