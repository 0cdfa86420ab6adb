"""Log-probabilities: what a request asks for, what a step is asked for, and how they are told."""
