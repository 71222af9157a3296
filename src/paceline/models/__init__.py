"""Networks as graphs over `Ops`, and how a folder becomes a loaded one.

At the top: what all have in common (spec, base, target, fields), and what finds its way among them (config,
inspection, registry, shards, adapter). `families/` has a file for each family, `layers/` what families share,
`drafters/` the networks that draft. Nothing here drafts, samples or schedules, and nothing reads bytes of a file: see
`drafters`, `engine` and `checkpoints` of the package.
"""
