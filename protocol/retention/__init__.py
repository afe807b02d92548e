"""Messages kept against retention."""
