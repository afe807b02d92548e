"""Records the history of a run as events, and checks it for anomalies. This checker is shared by
the demo, the simulations and the tests with real processes.
"""
