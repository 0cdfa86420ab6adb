"""The frontend language: programs of many calls over an engine or a server."""
