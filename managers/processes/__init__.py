"""Child processes: started, watched, started again; their reports, stacks and health."""
