"""Devices with memory of their own: what they can do, and the engines that land blocks there."""
