"""Structured output: grammars, what compiles them, the masks of a step, jump-forward, and thinking parts."""
