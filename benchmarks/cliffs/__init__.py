"""Paths beside the load of whole files, each against the natural alternative."""
