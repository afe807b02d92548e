"""`keylane scheduled`: the commands in `app.py`, and what each does."""
