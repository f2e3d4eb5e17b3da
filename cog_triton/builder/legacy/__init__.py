"""Translation of configs of older builders."""
