"""What a user names -> files on this machine: names, repositories of the Hugging Face hub, its cache, what is bundled.

Here belongs what speaks with the hub or knows its cache. How a file is read belongs to `checkpoints/`, and what a
model is to `models/`.
"""
