"""Trees: a checkpoint into a tree of the user's own, by a key map."""
