"""Operations under one signature each (base), and who runs them: plain torch, recordings for the C++ extension, and
`cuda/`.

Here belongs arithmetic and where it runs. Which operations make a network belongs to `models/`, what files hold to
`checkpoints/`.
"""
