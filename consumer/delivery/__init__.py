"""Messages as a consumer delivers them: decoding, filters, and acks by the user."""
