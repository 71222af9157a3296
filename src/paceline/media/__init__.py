"""Pictures and sound in a prompt: files -> pixels and samples -> the placeholders and rows that stand for them.

Here belongs what is done before a network sees them. The networks (towers) belong to `models/towers/`, and what an
API calls them to `server/`.
"""
