"""Loading: one load, from requests to arrays."""
