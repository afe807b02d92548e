"""Works on a data folder that no broker uses: inspects it, or rebuilds its index."""
