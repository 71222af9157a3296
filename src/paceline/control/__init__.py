"""How many tokens each request drafts in a step: the policies, without torch and without drafters.

Here belongs what decides a draft's length, from what it costs and how much of it is kept. Measuring at load belongs to
`startup/`, and drawing tokens to `engine/`.
"""
