"""Replicas of a model behind one front: who gets a request, who lives, one answer out of several."""
