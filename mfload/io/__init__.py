"""Bytes: where they come from (sources), where they land (buffers), who moves them (engines)."""
