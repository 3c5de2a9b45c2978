"""Sources: bytes by offset."""
