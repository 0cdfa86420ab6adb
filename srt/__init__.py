"""What a user starts: options, launcher, engine, HTTP server, command line."""
