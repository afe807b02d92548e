"""The commands of `keylane`, by what they are about."""
