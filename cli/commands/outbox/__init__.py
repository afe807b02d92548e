"""`keylane outbox`: the commands in `app.py`, and what each does."""
