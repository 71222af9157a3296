"""Models from one format to another: folders in Hugging Face layout to GGUF (to_gguf) and back (to_folder).

Here belongs what writes models. Reading them belongs to `checkpoints/`.
"""
