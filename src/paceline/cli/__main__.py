"""`python -m paceline.cli`, for a source tree that is not installed."""

from paceline.cli import main

main()
