"""The server over several machines: one ingress, one engine in each replica of a Ray Serve deployment.

Here belongs which replica gets a request, and what happens when one is lost. One engine over several processes
belongs to `parallel/`, and the APIs to `server/`.
"""
