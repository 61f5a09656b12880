"""One file for each command: its options, what it runs and reports."""
