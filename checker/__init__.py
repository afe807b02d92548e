"""Histories of runs, and the one checker that judges them, whether they come from the demo, from
simulations, or from tests with real processes.
"""
