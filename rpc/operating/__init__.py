"""The parts of a server for supervisors, scrapers and operators: metrics, health, logs, settings
reloaded at SIGHUP.
"""
