import pytest

from cog_triton.download.redaction import redact_url


def test_user_password_query_and_fragment_are_redacted() -> None:
    assert redact_url("https://u:p@host:8443/a/b.tar?key=1#x") == "https://host:8443/a/b.tar"
    assert redact_url("http://[::1]:80/") == "http://[::1]:80/"
    with pytest.raises(ValueError, match="IPv6"):
        redact_url("http://[::1/")
