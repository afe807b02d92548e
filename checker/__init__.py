"""Records the history of a run as events, and checks it for anomalies. The demo, the simulations
and the tests with real processes share this checker.
"""
