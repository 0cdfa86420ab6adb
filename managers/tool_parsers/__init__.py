"""Tool calls in a model's text: one incremental parser per format, used for whole replies and for streams alike."""
