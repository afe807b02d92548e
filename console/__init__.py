"""The console: pages that show a cluster live, and change it by the calls of the command line."""
