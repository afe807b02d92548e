"""Histories of runs and the one checker that judges them: of the demo, of simulations, of tests
with real processes.
"""
