"""The database compared with the brokers; nothing is changed."""
