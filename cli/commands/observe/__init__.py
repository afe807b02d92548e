"""`keylane observe`: what Prometheus and Grafana need to watch a cluster."""
