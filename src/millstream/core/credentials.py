"""Endpoints and credentials of object stores, from the environment and the files of their command lines."""

import os
import re
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from millstream.errors import AccessDenied, BadSetting, MissingExtra, RemoteError

_ENDPOINT = re.compile(r"https?://[^\s/\\<>\"]+(/[^\s<>\"]*)?")
_ENDPOINTS = {  # variables that name another server
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def object_store(root: str, stores: Any) -> Any:
    """The store of a root, by the module `obstore.store`."""
    names = _ENDPOINTS.get(root.partition(":")[0], ())
    more = _aws_profile() if root.startswith("s3:") else {}
    endpoint = next(filter(None, map(os.environ.get, names)), None) or more.get("config", {}).get("endpoint", "")
    client = {
        "connect_timeout": timedelta(seconds=5),
        "read_timeout": timedelta(seconds=20),  # without a byte
        "timeout": timedelta(seconds=300),
        # Credentials are sent in the clear only to an endpoint that the user named so.
        "allow_http": root.startswith("http:") or endpoint.startswith("http:"),
    }
    retry = {"max_retries": 0}  # `retried` tries again, also after a failure in the middle of a body
    if endpoint and not _ENDPOINT.fullmatch(endpoint):  # obstore would abort
        raise BadSetting(
            f"{root}: the endpoint in the environment is no URL. Expected https://HOST or http://HOST:PORT"
        )
    try:
        return stores.from_url(root, client_options=client, retry_config=retry, **more)
    except Exception as error:  # its text may repeat a key
        raise BadSetting(
            f"{root}: the credentials or settings in the environment are not valid ({type(error).__name__}). "
            "docs/how-to/remote.md lists them"
        ) from None


def _aws_profile() -> dict[str, Any]:
    """What obstore does not read: the profile in the files of the AWS command line, unless the environment has keys.

    Keys are given by a function, not as settings, so that they are in no object that is printed or pickled.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return {}
    name = os.environ.get("AWS_PROFILE", "default")
    profile: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(os.environ.get(variable) or Path.home() / ".aws" / file)
        except ConfigParserError:
            raise RemoteError(f"the AWS {file} file is not valid; {variable} names another one") from None
        profile |= dict(parser[section]) if section in parser else {}
    if not profile and "AWS_PROFILE" in os.environ:
        raise AccessDenied(f"AWS_PROFILE={name}: no such profile in the AWS config and credentials files")
    config = {"region": profile.get("region"), "endpoint": profile.get("endpoint_url")}
    config = {key: value for key, value in config.items() if value}
    if "aws_access_key_id" in profile:
        keys = {
            "access_key_id": profile["aws_access_key_id"],
            "secret_access_key": profile.get("aws_secret_access_key", ""),
            "token": profile.get("aws_session_token"),
            "expires_at": None,
        }
        return {"config": config, "credential_provider": lambda: keys}
    if {"sso_session", "sso_start_url", "role_arn", "credential_process"} & profile.keys():
        session = import_extra("boto3", f"AWS_PROFILE={name}", "boto3").Session(profile_name=name)
        provider = import_module("obstore.auth.boto3").Boto3CredentialProvider(session)
        return {"config": config, "credential_provider": provider}
    return {"config": config}


def import_extra(module: str, where: str, package: str = "'millstream[cloud]'") -> Any:
    """A module of the extra `cloud`, or of another package."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra(f"{where}: needs {module}. Run: pip install {package}") from None
