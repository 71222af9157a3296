"""What a model needs of memory and disk, and how fast it will be here, before it is loaded.

Here belongs what `paceline info` says of a model whose weights need not be there: published shapes, sizes, speeds of
slices with random weights. What a loaded model reaches is measured by `bench/`.
"""
