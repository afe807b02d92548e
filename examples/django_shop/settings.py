"""Settings of the project: one URL names the database, for Django and for keylane."""

import os

from sqlalchemy import make_url

KEYLANE_META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
DATABASE_URL = os.environ.get("DATABASE_URL", "sqlite:///shop.db")

_url = make_url(DATABASE_URL)
_backends = {"postgresql": "postgresql", "sqlite": "sqlite3"}
DATABASES = {
    "default": {
        "ENGINE": f"django.db.backends.{_backends[_url.get_backend_name()]}",
        "NAME": _url.database,
        "USER": _url.username or "",
        "PASSWORD": _url.password or "",
        "HOST": _url.host or _url.query.get("host", ""),
        "PORT": _url.port or "",
    }
}
SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
