"""Sets Django up on a database of SQLite, before tests import models."""

import os
import tempfile

import django

_folder = tempfile.TemporaryDirectory()
os.environ["DATABASE_URL"] = f"sqlite:///{_folder.name}/shop.db"
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # in virtual time threads run in the event loop
django.setup()
