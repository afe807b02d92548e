"""Where new consumer groups begin."""
