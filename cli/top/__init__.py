"""`keylane top`: a live screen of a cluster.

Asker ─▶ Board ─▶ tables ─▶ TopApp
asks     knows     text      draws
"""
