"""Inputs of commands: documents, models and clusters, read from options."""
