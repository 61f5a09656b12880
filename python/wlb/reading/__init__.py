"""Reads documents for steps: rows, orders, positions, states. Needs numpy alone, for loaders of torch and of others."""
