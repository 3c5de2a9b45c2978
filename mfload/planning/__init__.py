"""Planning: from an index and requests to buffers and reads. Pure."""
