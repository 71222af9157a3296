"""Chat formats: how families of models write thoughts and tool calls, and which one a template writes.

Here belongs a notation, its parser and its grammar. The template that shows which one it is stays with the model.
"""
