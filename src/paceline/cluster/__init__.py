"""The server over several machines: one ingress, one engine in each replica of a Ray Serve deployment."""
