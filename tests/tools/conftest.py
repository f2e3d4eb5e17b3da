import clean_environment
from engine_fixtures import engine_dir, engine_tar, stack  # noqa: F401

clean_environment.clean()
