"""Networks as graphs over `Ops`, and how a folder becomes a loaded one.

At the top: what all have in common (spec, base, target, fields), and what finds its way among them (config,
inspection, registry, shards, adapter). `families/` has a file for each family, `layers/` what families share,
`drafters/` the networks that draft. Drafting, sampling and scheduling belong to `drafters` and
`engine` of the package, and bytes of files to `checkpoints`.
"""
