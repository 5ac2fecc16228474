"""Lets these tests run on a GPU machine that has pytest and pytest-timeout but not all of our plugins."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know pytest-asyncio's settings in pyproject.toml without it, since unknown ones are errors; no test is async."""
    if not pluginmanager.hasplugin("asyncio"):
        for setting in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(setting, "of pytest-asyncio, which is not here")
