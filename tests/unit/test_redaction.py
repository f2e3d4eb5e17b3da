import pytest

from cog_triton.system.redaction import redact_address, redact_url


def test_user_password_query_and_fragment_are_redacted() -> None:
    assert redact_url("https://u:p@host:8443/a/b.tar?key=1#x") == "https://host:8443/a/b.tar"
    assert redact_url("http://[::1]:80/") == "http://[::1]:80/"
    with pytest.raises(ValueError, match="IPv6"):
        redact_url("http://[::1/")


@pytest.mark.parametrize("scheme", ["s3", "ftp", "file", "https", "gs", "S3"])
def test_addresses_are_redacted_in_every_scheme(scheme: str) -> None:
    address = f"{scheme}://KEY:SECRET@bucket/x.tar?X-Amz-Signature=SECRET#SECRET"
    assert redact_address(address).lower() == f"{scheme.lower()}://bucket/x.tar"


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:SEC/RET@bucket/x.tar",
        "s3://KEY:SEC#RET@bucket/x.tar",
        "s3://KEY:12/RET@bucket/x.tar",
        "s3://KEY:SEC]RET@bucket/x.tar",
    ],
)
def test_of_a_url_that_cannot_be_taken_apart_the_scheme_is_left(address: str) -> None:
    assert redact_address(address) == "s3://..."


def test_paths_are_shown_unchanged() -> None:
    assert redact_address("models/a@b?c") == "models/a@b?c"
