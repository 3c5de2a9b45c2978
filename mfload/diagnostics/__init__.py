"""What this machine can do for a load, found out without harm."""
