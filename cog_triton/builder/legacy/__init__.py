"""Legacy build configs: translation for the scripts of today."""
