"""Settings: every environment variable that the package reads, typed, in groups."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from cog_triton.errors import InvalidArgument
from cog_triton.removed import check_environment
from cog_triton.settings.addresses import AccessSettings, PortSettings
from cog_triton.settings.addresses import url_host as url_host
from cog_triton.settings.engine import EngineSettings, MockSettings, SupervisionSettings
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR as IMAGE_ENGINE_DIR
from cog_triton.settings.environment_types import SettingsGroup
from cog_triton.settings.programs import BuilderSettings, FileSettings, RankSettings
from cog_triton.settings.request_defaults import LogSettings, RequestSettings

Group = TypeVar("Group", bound=SettingsGroup)


# Pydantic has the fields of the last base first.
class Settings(
    MockSettings,
    BuilderSettings,
    RankSettings,
    FileSettings,
    SupervisionSettings,
    LogSettings,
    RequestSettings,
    AccessSettings,
    PortSettings,
    EngineSettings,
):
    """Settings of a server, which are those of all groups."""


GROUPS = [each for each in reversed(Settings.__bases__) if issubclass(each, SettingsGroup)]
"""All of them, in the order of docs/settings.md."""


class BuildSettings(BuilderSettings, FileSettings):
    """Settings of builds, in each of their processes."""


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment; raises E1005 naming the variable, value and rule."""
    check_environment()
    return load_group(Settings, **overrides)


def load_group(kind: type[Group], **overrides: object) -> Group:
    """Settings of one process, without a look at those of others; raises E1005 as well."""
    try:
        return kind(**overrides)
    except ValidationError as error:
        problems = [
            f"{str(item['loc'][0]).upper()}={item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise InvalidArgument("; ".join(sorted(problems))) from error
