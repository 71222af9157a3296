"""What speculation brings, measured: workloads, runs in turns with the baseline, tables and pages.

Here belongs what measures a loaded pair for people. What a model that is not loaded needs belongs to `forecast/`, what
the policy measures for itself to `startup/`, and whether texts are equal to `check/`.
"""
