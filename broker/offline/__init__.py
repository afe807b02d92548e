"""Work on a data folder that no broker uses: looked into, its index rebuilt."""
