"""`keylane meta`: the commands in `app.py`, and what each does."""
