"""Networks that make soft tokens of pictures and sound, a file for each kind, beside what finds and loads them.

Here belongs arithmetic on pixels and samples. How files become those belongs to `media/`, and text layers to `layers/`.
"""
