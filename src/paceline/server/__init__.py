"""The HTTP service: APIs (OpenAI, Responses, Ollama), the page, and what protects both.

Here belongs what is said over HTTP, and what becomes of it as requests. How a model writes thoughts and calls belongs
to `text/formats/`, the thread that owns the engine to `engine/worker.py`, and replicas to `cluster/`.
"""
