"""Sharding: a load spread over the devices of a mesh, in one process or in several."""
