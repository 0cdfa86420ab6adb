"""The runner that a config asks for. Torch is imported only with a runner that needs it."""

from __future__ import annotations

from .step import Runner, RunnerConfig


def create_runner(config: RunnerConfig) -> Runner:
    """Build the runner and load its model; returns when the model is loaded."""
    if config.load_format == "oracle":
        from .oracle import OracleRunner

        return OracleRunner(config)
    from .model_runner import ModelRunner

    return ModelRunner(config)
