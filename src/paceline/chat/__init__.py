"""A chat, from messages to tokens and back: the road that every door takes.

Here belongs what is the same whoever asks: messages in one form, repairs, the template, media, tokens, room in the
context, what a grammar holds, and the events of an answer. No API and no command is known here.
"""
