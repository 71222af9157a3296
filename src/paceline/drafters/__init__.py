"""What proposes tokens: one protocol (base), a guard for third parties, and a file for each way to draft.

Here belongs when and how far a drafter drafts, and what it keeps of a text. The network that it asks belongs to
`models/drafters/`, how many tokens are worth it to `control/`, and drawing them to `engine/sampler.py`.
"""
