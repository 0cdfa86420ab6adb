"""What runs the calls of a program: a server over HTTP, an engine in this process, or somebody's API."""
