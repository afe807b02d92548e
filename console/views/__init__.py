"""The pages of the console, each made of what a feed knows."""
