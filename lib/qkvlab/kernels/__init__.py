"""The stages, one file each, in the order of the story."""
