"""Outputs of commands: one kind of report, its tables, figures and page; files of plans."""
