"""The `keylane` command: a cluster on this machine, subjects, groups, messages, and the demo."""
