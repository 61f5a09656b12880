"""What commands give back: one kind of report, its tables, figures and page; files of plans."""
