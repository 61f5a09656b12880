"""`python -m wlb.cli`."""

from wlb_command import main

main()
