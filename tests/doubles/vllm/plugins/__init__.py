"""Double of vllm/plugins/__init__.py: entry points of the group, those that VLLM_PLUGINS lists."""

import logging
import os
from importlib.metadata import entry_points

plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded
    if plugins_loaded:
        return
    plugins_loaded = True
    listed = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.general_plugins"):
        if listed is None or plugin.name in listed.split(","):
            try:
                function = plugin.load()
            except Exception:
                logging.getLogger(__name__).exception("Failed to load plugin %s", plugin.name)
            else:
                function()
