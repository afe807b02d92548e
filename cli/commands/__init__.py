"""The commands of `keylane`, grouped by topic."""
