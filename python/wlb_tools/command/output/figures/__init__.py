"""The pictures of the reports, one file for each subject."""
