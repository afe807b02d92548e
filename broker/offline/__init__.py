"""Work on a data folder that no broker uses: inspect it, rebuild its index."""
