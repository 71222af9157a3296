"""What speculation brings, measured and estimated: workloads, runs in turns with the baseline, tables, memory and
speed of models that are not loaded.

Here belongs what ends as a figure for people. What the policy measures for itself belongs to `startup/`, and whether
texts are equal to `check/`.
"""
