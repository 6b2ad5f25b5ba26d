"""Models that can be sliced. Know nothing of scripts."""
