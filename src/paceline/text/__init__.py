"""Text in and out: tokenizer, chat templates, incremental decoding and stop strings.

Here belongs what lies between characters and tokens. How families write thoughts and calls belongs to `formats/`, and
what an API calls them to `server/`.
"""
