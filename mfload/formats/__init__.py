"""Formats: functions from a source to rows of the index. They don't know each other."""
