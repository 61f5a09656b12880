"""Inputs of commands, read from options: documents, models and clusters."""
