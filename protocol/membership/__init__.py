"""The programs of a cluster: their versions, and the metaserver's view of them. Pure."""
