"""The database: its schema, its connections, its transactions and its clock."""
