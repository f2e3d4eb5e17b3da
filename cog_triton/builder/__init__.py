"""From a build config to engine.tar: config > plan > steps."""
