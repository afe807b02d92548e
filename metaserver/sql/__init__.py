"""The database: its schema, connections, transactions and clock."""
