"""Is a server's speculation lossless? Two OpenAI-compatible endpoints are asked the same things and compared.

Any engine will do: one endpoint speculates, the other does not. Knows HTTP and nothing of our own engine.

Here belongs what is asked and how answers are judged. Proofs over an engine of ours belong to `check/`.
"""
