"""`python -m keylane.cli` is the `keylane` command."""

from .main import main

if __name__ == "__main__":
    main()
