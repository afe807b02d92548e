"""What supervisors, scrapers and operators of a server need: metrics, health, logs, settings taken
over at SIGHUP.
"""
