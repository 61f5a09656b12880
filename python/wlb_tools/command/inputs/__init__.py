"""What commands are given: documents, models and clusters, read from options."""
