"""`python -m wlb.cli`."""

from wlb.cli import main

main()
