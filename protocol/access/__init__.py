"""Access control: principals, tokens, grants, capabilities and quotas."""
