import pytest

from cog_triton.download.redaction import shown


def test_what_a_url_may_show() -> None:
    assert shown("https://u:p@host:8443/a/b.tar?key=1#x") == "https://host:8443/a/b.tar"
    assert shown("http://[::1]:80/") == "http://[::1]:80/"
    with pytest.raises(ValueError, match="IPv6"):
        shown("http://[::1/")
