"""`keylane parked`: the commands in `app.py`, and what each does."""
