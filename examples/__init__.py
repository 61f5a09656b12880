"""Programs to read and to copy from; each runs as it stands."""
