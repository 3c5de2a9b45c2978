"""Into: loading into a tree of the user's own, its names, shapes and shardings."""
