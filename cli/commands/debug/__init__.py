"""`keylane debug`: what an operator sends to those who help."""
