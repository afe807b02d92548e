"""The database: its schema, the way to it, its transactions and its clock."""
